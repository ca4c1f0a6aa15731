"""doctor.py's findings: each is provoked by invented facts, alone, and a healthy job has none."""

import pytest

from scripts.checkup.report import FAIL, NOTE, SLOW, find_problems, verdict
from scripts.doctor import CHECKS
from tests.support.doctor_job import (
    ALL_CORES,
    ALONE,
    GB,
    LINK,
    MPICH,
    NO_GPU,
    NODE_1,
    ONE_CORE,
    OPEN_MPI,
    change,
    changes,
    error,
    healthy,
)

# what is found: (what is changed, severity, words of the finding's text, words of its fix)
CASES = {
    "lost": [(change("lost", "a world of 1 rank, but 4 started; use --mpi=pmix"), FAIL, "but 4 started", "--mpi=pmix")],
    "no_mpi": [(error("MPI", "RuntimeError: cannot load MPI library", 2), FAIL, "rank 2 on node1: Run", "module")],
    "unreadable": [
        (error("BLAS", "ImportError: libblas.so", 3), FAIL, "BLAS could not be checked on rank 3 on node1", "pip"),
        (error("packages", "ModuleNotFoundError: numba", *NODE_1), FAIL, "ranks 2-3 on node1: Mo", "pip"),
        (error("GPUs", "ValueError: 7", 0), NOTE, "GPUs could not be checked on rank 0 on node0: Va", "alone"),
    ],
    "different_versions": [
        (change("software/source", "89abcdef", 2), FAIL, "this project differs between nodes: 01234567 on", "one copy"),
        (change("MPI/library", "MPICH 4.2", 2), FAIL, "MPI library differs between nodes: MPICH 5.0", "one copy"),
        (change("software/versions/mpi4py", "4.0.0", 2), FAIL, "mpi4py differs between nodes", "one copy"),
    ],
    "other_mpirun": [
        (change("launcher/mpiruns", [OPEN_MPI], 0), NOTE, "mpirun on PATH is Open MPI's (/usr/bin/mpi", "load"),
        (changes(ALONE, change("launcher/mpiruns", [OPEN_MPI, MPICH | {"where": "beside this Python"}])), FAIL,
         "mpi4py has MPICH 5.0.2", "start with /opt/mpich/bin/mpirun"),
    ],
    "slow_kernels": [
        (changes(change("BLAS/text", "OpenBLAS, Nehalem kernels (forced)", 2, 4),
                 change("BLAS/variables", {"OPENBLAS_CORETYPE": "Nehalem"}, 2, 4),
                 change("BLAS/unused", "AVX2", 2, 4)),
         SLOW, "OpenBLAS, Nehalem kernels (forced), on node1 and node2: matrix products are slow",
         "unset OPENBLAS_CORETYPE"),
        (change("BLAS/unused", "AVX-512", 0), SLOW, "Zen kernels, on node0: matrix", "install a newer NumPy"),
    ],
    "crowded": [
        (change("cores", {**ALL_CORES, "affinity": [0], "count": 1}, *NODE_1), SLOW, "2 ranks share 1 core", ""),
        (change("cores", ONE_CORE, 2, 3), SLOW, "ranks 2-3 on node1 are bound to the same 1 core", "--bind-to none"),
    ],
    "idle_cores": [
        (changes(change("cores", ONE_CORE, 2), change("cores", {**ONE_CORE, "affinity": [1]}, 3)), SLOW,
         "the ranks on node1 may run on 2 of 8 cores", "PE=4"),
        (changes(change("cores", {**ONE_CORE, "affinity": [0]}, 2), change("cores/affinity", [1, 2, 3, 4, 5, 6], 3),
                 change("cores/variables", {}, 3)), SLOW, "may run on 7 of 8 cores", "--cpus-per-task=4"),
    ],
    "few_threads": [
        (change("cores/variables", {"OMP_NUM_THREADS": "1"}), SLOW, "is 1, and ranks 0-7 on node0", "OMP_NUM_THREADS=4")
    ],
    "slow_ranks": [
        (change("speed", 45e9, 5), SLOW, "rank 5 on node2 compute matrix products at 50% of the others' rate", "top"),
    ],
    "too_little_memory": [
        (change("memory/limit", GB // 4, *NODE_1), FAIL, "on node1 before activations, 250 MB are free", "--mem=0"),
    ],
    "little_shared_memory": [
        (change("shared memory/free", 64 << 20, 4), FAIL, "/dev/shm on node2 has 67.1 MB free", "--shm-size"),
    ],
    "left_over_segments": [
        (
            change("shared memory/left", [["/dev/shm/mpich_shm_1_0", 2 * GB], ["/dev/shm/mpich_shm_2_0", GB]], *NODE_1),
            NOTE, "2 segments of killed jobs in /dev/shm on node1 hold 3", "doctor.py --remove-segments",
        ),
    ],
    "run_folder": [
        (change("run folder/problem", "Permission denied", 5), FAIL, "rank 5 on node2 cannot write to /sha", "--out"),
        (change("sees run folder", False, *NODE_1), FAIL, "ranks 2-3 on node1 do not see what rank 0 writes", "share"),
        (change("run folder/free", 2 * GB), FAIL, "2 GB free in /shared", "larger"),
    ],
    "slow_ports": [
        (change("link", LINK | {"out": 7.6e9}, *NODE_1), SLOW, "node1 sends at 69% of the others' rate (7.6 GB/s of 11",
         "cable"),
        (change("link", LINK | {"in": 7.6e9}, *NODE_1), SLOW, "node1 receives at 69% of the others' rate", "cable"),
    ],
    "slow_latency": [
        (change("link", LINK | {"latency_s": 9e-6}, *NODE_1), SLOW, "0.009 ms of latency at node1, 0.002 ms", "switch")
    ],
    "idle_infiniband": [
        (change("traffic", {"eth0": 10**9, "mlx5_0:1": 0}), SLOW, "sends through eth0, and mlx5_0:1 is idle", "ucx"),
    ],
    "cudnn": [(change("own GPU/cudnn", None, *NODE_1), NOTE, "no cuDNN frontend on node1: att", "nvidia-cudnn-")],
    "unused": [
        (change("own GPU", NO_GPU | {"cupy": None, "problem": "ImportError: cupy"}), SLOW, "CuPy finds none: I", "pip"),
        (changes(change("own GPU", NO_GPU, *NODE_1), change("GPUs/variables", {"CUDA_VISIBLE_DEVICES": ""}, *NODE_1)),
         FAIL, "node1 has GPUs, and CuPy finds none: none is visible", "CUDA_VISIBLE_DEVICES is '': ask"),
    ],
    "shared": [(changes(change("own GPU/id", "0000:00", 3), change("GPUs/listed", [{"driver": "580.1"}], 2)), FAIL,
                "ranks 2-3 share one GPU on node1", "--share-gpus")],
    "driver_too_old": [
        (change("own GPU/driver_cuda", 12040, *NODE_1), FAIL, "driver on node1 is for CUDA 12, CuPy", "cuda12"),
        (changes(change("own GPU/driver_cuda", 12040), change("own GPU/runtime_cuda", 12040)), FAIL,
         "is for CUDA 12, CuPy or cuBLAS for CUDA 13", "cuda12"),
        (change("own GPU", NO_GPU | {"driver_cuda": 12080, "runtime_cuda": 13000}, *NODE_1), FAIL, "CUDA 12", ""),
    ],
    "slowed": [
        (change("own GPU/power_w", 400, 3), SLOW, "power limit of the GPU of rank 3 on node1 is 400 W, by default 700",
         "nvidia-smi -pl 700"),
        (change("own GPU/clock_mhz", 1200, *NODE_1), SLOW, "clock of the GPU of ranks 2-3 on node1 is 1200 MHz, by",
         "nvidia-smi -rac"),
    ],
    "used_by_others": [(change("own GPU/free", 41 * GB, 3), SLOW, "100 GB of the GPU of rank 3 on node1", "nvidia")],
    "transport": [
        (change("own GPU/nccl_missing", "no libnccl.so.2"), SLOW,
         "no NCCL on node0, node1, node2 and node3 (no libnccl.so.2)", "nvidia-nccl-cu13"),
    ],
}  # fmt: skip
FLAT_CASES = [pytest.param(*case, id=f"{name} {i}") for name, cases in CASES.items() for i, case in enumerate(cases)]


@pytest.mark.parametrize("model", [None, "tiny", "gpt2-124M"])
@pytest.mark.parametrize("shape", [{}, {"nodes": 1}, {"nodes": 2, "ranks_per_node": 2}, {"nodes": 9}])
def test_a_healthy_job_has_no_findings(shape, model):
    ranks = healthy(**shape)
    assert find_problems(CHECKS, ranks, model) == []
    assert "nothing found" in verdict([], ranks[0]["place"])


def test_small_differences_between_links_are_no_findings():
    """A port at 71% of the others' rate, a latency four times theirs. Of two nodes nobody can say which is odd."""
    ranks = healthy()
    change("link", LINK | {"out": 7.8e9, "in": 7.8e9, "latency_s": 7.9e-6}, *NODE_1)(ranks)
    assert find_problems(CHECKS, ranks) == []
    ranks = healthy(nodes=2)
    change("link", LINK | {"out": 1e6, "in": 1e6, "latency_s": 1.0}, *NODE_1)(ranks)
    assert find_problems(CHECKS, ranks) == []


@pytest.mark.parametrize(("changed", "severity", "text", "fix"), FLAT_CASES)
def test_a_finding_is_provoked_alone(changed, severity, text, fix):
    ranks = healthy()
    changed(ranks)
    findings = find_problems(CHECKS, ranks, "gpt2-124M")
    assert len(findings) == 1, findings
    assert findings[0].severity == severity
    assert text in findings[0].text
    assert fix in findings[0].fix
