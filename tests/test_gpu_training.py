"""scripts/train.py on GPUs that are none: every strategy over every transport, on a CuPy whose GPU is the CPU shim."""

import json
import shutil

import numpy as np
import pytest
from cuda_shim import fake_cupy, fake_streams
from cuda_shim.fake_cublaslt import FakeCublasLt
from cuda_shim.shim import Shim, lasting_build
from in_process import alone, log
from in_process import train as train_here

from gpt2.cupy_kernels import cublaslt, device
from gpt2.shards import write_shard
from strategies import OVERLAPPED, OWN_EXCHANGES, STRATEGIES, Bucketed

SMALL = ["--n-layer", 1, "--n-head", 1, "--n-embd", 64, "--context", 8, "--vocab-size", 100, "--steps", 2]
USUAL = ["--batch-size", 1, "--lr", 1e-2, "--warmup", 1, "--eval-every", 2, "--eval-steps", 1, "--trace", "off"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU shim needs g++")


class Trainer:
    """Runs of scripts/train.py in this process, on all ranks of a world, each on a newly made GPU."""

    def __init__(self, comm, monkeypatch, folder):
        import choose_backend
        import transports

        from dist.world import start_world

        self.monkeypatch, self.world = monkeypatch, start_world()
        self.folder = folder
        self.shim = Shim(lasting_build())
        self.count = 0
        monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
        monkeypatch.setattr(device, "cached_code", lambda source, storage, arch, cache: f"{source} {storage}".encode())
        monkeypatch.setattr(transports, "says_gpu_aware", lambda: (True, "this test"))
        monkeypatch.setattr(choose_backend.importlib.util, "find_spec", lambda name: True)
        if comm.rank == 0:
            write_shard(self.folder / "tokens.bin", np.random.default_rng(1).integers(100, size=3001).astype(np.uint16))
        comm.Barrier()

    def run(self, *flags, world=None, **machine):
        """(loss and norm of each step and the last validation loss, the checkpoint's bytes) of one run."""
        world = world or self.world
        self.count += 1
        out = self.folder / f"{self.count}-{self.world.rank if world.size == 1 else 0}"
        fake_cupy.install(self.monkeypatch, self.shim, **{"gpus": 4, "nccl": True} | machine)
        data = ["--train-data", self.folder / "tokens.bin", "--val-data", self.folder / "tokens.bin"]
        registered = fake_cupy.Host.registered
        train_here(world, out, *SMALL, *USUAL, *data, *flags)
        assert fake_cupy.Host.registered == registered, "all memory that was pinned is let go"
        lines = log(out)
        curve = [number for line in lines for number in (line["loss"], line["grad_norm"])] + [lines[-1]["val_loss"]]
        checkpoints = [path.read_bytes() for path in out.glob("checkpoints/*/model.bin")]
        self.config = json.loads((out / "config.json").read_text())
        return np.array(curve), checkpoints


@pytest.fixture
def trainer(comm, monkeypatch, shared_path):
    return None if comm is None else Trainer(comm, monkeypatch, shared_path)


def cases(ranks):
    """(flags, transport in the end) of every strategy over every transport."""
    for name, kind in STRATEGIES.items():
        if name == "none":
            continue
        yield ["--strategy", name, "--transport", "host"], "host"
        device = "alone" if ranks == 1 else "nccl"
        if issubclass(kind, OWN_EXCHANGES) or name in OVERLAPPED:
            yield ["--strategy", name, "--overlap"], "host" if issubclass(kind, Bucketed) else device
        if not issubclass(kind, OWN_EXCHANGES):
            yield ["--strategy", name], device
        if not issubclass(kind, Bucketed):
            yield ["--strategy", name, "--transport", "gpu-aware"], "gpu-aware"
    if ranks > 1:
        yield ["--strategy", "reduce-bcast", "--server", "dedicated"], "nccl"
        yield ["--strategy", "reduce-bcast", "--server", "dedicated", "--transport", "host"], "host"


@pytest.mark.ranks(1, 3)
def test_every_transport_gives_numpys_curve(comm, trainer):
    """One step: the validation loss is that of the new parameters. The tests below go on to a second."""
    steps = ["--steps", 1, "--eval-every", 1]
    reference = {}
    for server in ([], ["--server", "dedicated"]) if comm.size > 1 else ([],):
        reference[bool(server)], _ = trainer.run(*steps, "--backend", "numpy", "--strategy", "reduce-bcast", *server)
    for flags, transport in cases(comm.size):
        curve, checkpoints = trainer.run(*steps, "--backend", "cupy", *flags)
        assert trainer.config["settings"]["transport"] == transport
        np.testing.assert_allclose(curve, reference["--server" in flags], rtol=1e-4, err_msg=str(flags))
        assert len(checkpoints) == 1


DEEP = ["--n-layer", 3, "--grad-accum", 2]  # layers that take turns in ZeRO's places, micro-steps that add up
LATE = (
    ["--strategy", "reduce-scatter", "--transport", "host"],
    ["--strategy", "hierarchical", "--overlap", "--wire", "bfloat16"],
    ["--strategy", "zero-2", "--transport", "host", "--overlap", *DEEP],
    ["--strategy", "zero-3", "--transport", "host", "--overlap", *DEEP],
    ["--strategy", "reduce-scatter", "--dtype", "bfloat16", "--transport", "host"],
    # Without copies there is less that can be late.
    ["--strategy", "sliced", "--dtype", "bfloat16", "--transport", "gpu-aware"],
    ["--strategy", "allreduce", "--dtype", "bfloat16", "--transport", "nccl"],
)


@pytest.mark.any_mpi
@pytest.mark.ranks(1, 3)
def test_when_copies_and_kernels_happen_changes_no_bit(comm, trainer, monkeypatch):
    """Late copies, late kernels, one stream ahead of another, memory that cannot be pinned: the same bits each time."""
    import gpu_copies

    monkeypatch.setattr(gpu_copies, "CHUNK", 9000)  # of 59 thousand parameters
    machines = [{"lag": lag} for lag in fake_streams.LAGS] + [{"pins": False}]
    if comm.size > 1:
        machines = machines[:1] * 2
    for flags in LATE if comm.size == 1 else LATE[:4]:
        some = machines if "bfloat16" not in flags else [machines[0], {"lag": "everything"}]
        (curve, checkpoint), *others = [trainer.run("--backend", "cupy", *flags, **machine) for machine in some]
        for other_curve, other_checkpoint in others:
            np.testing.assert_array_equal(other_curve, curve, err_msg=str(flags))
            assert other_checkpoint == checkpoint, flags


@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_bfloat16_is_a_serial_bfloat16_run(comm, trainer):
    """The same global batch on one rank; and NumPy's float32, further off."""
    serial, _ = trainer.run("--backend", "cupy", "--dtype", "bfloat16", "--batch-size", comm.size, world=alone())
    exact, _ = trainer.run("--backend", "numpy")
    assert 1e-5 < np.abs(serial / exact - 1).max() < 2e-2
    for name, transport in (
        ("reduce-scatter", "nccl"), ("reduce-bcast", "gpu-aware"), ("reduce-bcast", "host"), ("tree", "host"),
        ("zero-3", "host"),
    ):  # fmt: skip
        flags = ["--dtype", "bfloat16", "--strategy", name, "--transport", transport]
        curve, _ = trainer.run("--backend", "cupy", *flags)
        np.testing.assert_allclose(curve, serial, rtol=5e-3, err_msg=str(flags))


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_a_checkpoint_goes_from_gpu_to_gpu_and_to_numpy(comm, trainer):
    _, (before,) = trainer.run("--backend", "cupy", "--strategy", "sliced")
    init = trainer.folder / "model.bin"
    if comm.rank == 0:
        init.write_bytes(before)
    comm.Barrier()
    losses = []
    for flags in (["numpy"], ["cupy"], ["cupy", "--strategy", "hierarchical"], ["cupy", "--strategy", "zero-3"]):
        curve, (after,) = trainer.run("--backend", *flags, "--init", init, "--lr", 0, "--seed", 5)
        losses.append(curve[-1])
        assert after == before, flags
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def broken_waits():
    """Each wait of the way through host memory: what takes it out, flags of a run it is for, and which work lags."""
    import gpu_bridge
    from gpu_bridge import HostBridge
    from gpu_copies import Copied, Copies

    into, computed = Copies.into, Copies.computed

    def never(self):
        mark = computed(self)
        mark.event.stream = None
        return mark

    def at_once(self, host, target, after=None):
        return into(self, host, target)

    def gradients_final(bridge, start, stop):
        copy = bridge.copies.out(bridge.model.gradients[start:stop], bridge.exchanged.gradients[start:stop])
        bridge.on_the_way.append((start, stop, copy))

    host = ["--strategy", "reduce-scatter", "--transport", "host"]
    zero = ["--strategy", "zero-3", "--transport", "host", "--overlap", *DEEP]
    return {
        "copies out are not waited for": (Copied, "Test", lambda self: True, host, "copies"),
        "compute does not wait for copies in": (Copies, "before_compute", lambda self, copy: None, host, "copies"),
        "copies out do not wait for compute": (Copies, "computed", never, host, "first stream"),
        "gradients go where AdamW still reads": (Copies, "into", at_once, host, "all but copies in"),
        "parameters go where kernels still read": (Copies, "into", at_once, zero, "all but copies in"),
        "parameters come where copies still read": (gpu_bridge, "wait", lambda copied: None, zero, "everything"),
        "two ranges are in one place": (HostBridge, "gradients_final", gradients_final, zero, "copies"),
    }  # fmt: skip


@pytest.mark.any_mpi
@pytest.mark.ranks(1)
def test_without_any_of_the_waits_the_numbers_are_wrong(comm, trainer, monkeypatch):
    import gpu_copies

    monkeypatch.setattr(gpu_copies, "CHUNK", 9000)
    for what, (kind, name, broken, flags, lag) in broken_waits().items():
        right, _ = trainer.run("--backend", "cupy", *flags, lag=lag)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, broken)
            try:
                wrong, _ = trainer.run("--backend", "cupy", *flags, lag=lag)
            except SystemExit:  # the loss was not a number
                continue
        assert not np.allclose(wrong, right, rtol=1e-4), what


MISTAKES = {
    "no driver": ([], {"gpus": None}, "no GPU (cudaErrorInsufficientDriver"),
    "an old GPU": ([], {"capability": "75"}, "compute capability 7.5, expected 8.0"),
    "heads": (["--n-head", 2], {}, "heads of 32 channels, expected 64 or 128"),
    "one GPU": ([], {"gpus": 1}, "ranks 0, 1 have one GPU on {host}, expected one each"),
    "no NCCL": (["--transport", "nccl"], {"nccl": False}, "--transport nccl: CuPy finds no libnccl.so.2: pip install"),
    "NCCL on one GPU": (["--transport", "nccl", "--share-gpus"], {"gpus": 1}, "start a rank for each GPU"),
    "not GPU-aware": (["--transport", "gpu-aware"], {"aware": False}, "--transport gpu-aware: this MPI says it is not"),
    "GPU-aware, it says": (["--transport", "gpu-aware"], {"proven": False}, "comes out wrong"),
    "ring over NCCL": (["--strategy", "ring", "--transport", "nccl"], {}, "--transport nccl with --strategy ring"),
    "overlap without NCCL": (["--overlap"], {"nccl": False}, "--strategy reduce-scatter (CuPy finds no libnccl.so.2):"),
    "overlap through the host": (["--overlap", "--transport", "host"], {}, "with --transport host: its calls go on"),
    "overlap by calls that block": (["--overlap", "--transport", "gpu-aware"], {}, "whose calls return when all is"),
    "overlap on cores": (["--overlap", "--backend", "numpy"], {}, "--strategy reduce-scatter with --backend numpy:"),
    "overlap by auto": (["--overlap", "--backend", "auto"], {"gpus": None}, "numpy (--backend cupy: no GPU"),
    "overlap of rooted calls": (["--overlap", "--strategy", "sliced"], {}, "or over NCCL reduce-scatter, allreduce"),
    "bfloat16 over NCCL": (
        ["--strategy", "zero-2", "--transport", "nccl", "--wire", "bfloat16"],
        {},
        "--transport nccl with --wire bfloat16, which is rounded in host memory",
    ),
    "auto over NCCL": (["--strategy", "auto", "--transport", "nccl"], {}, "name a strategy"),
    "memory for the buffers": (["--n-layer", 12], {"free": 36 << 20}, "out of GPU memory: 0.00 GB asked for"),
    "memory for copies": (["--transport", "host"], {"free": 60 << 20}, "out of GPU memory: 0.02 GB asked for"),
    "memory for AdamW": (["--strategy", "ring", "--n-layer", 12], {"free": 103 << 20}, "out of GPU memory"),
    "memory for the model": (["--batch-size", 512], {"free": 50 << 20}, "lower --batch-size"),
    "bfloat16 on cores": (["--backend", "numpy", "--dtype", "bfloat16"], {}, "which computes in float32: use"),
    "NCCL on cores": (
        ["--backend", "numpy", "--transport", "nccl"],
        {},
        "arrays are in host memory: use --backend cupy",
    ),
    "random rounding of float32": (["--stochastic-rounding"], {}, "--stochastic-rounding with --dtype float32, whose"),
    "random rounding after the wire's": (
        ["--strategy", "zero-2", "--stochastic-rounding", "--dtype", "bfloat16", "--wire", "bfloat16"],
        {},
        "--wire bfloat16 and --strategy zero-2, which gathers parameters rounded to nearest: leave",
    ),
    "random rounding on cores": (
        ["--backend", "numpy", "--dtype", "bfloat16", "--stochastic-rounding"],
        {},
        "--dtype bfloat16 with --backend numpy, which computes in float32",
    ),
    "bfloat16 by auto": (["--backend", "auto", "--dtype", "bfloat16"], {"gpus": None}, "numpy (--backend cupy: no GPU"),
}


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_a_mistake_ends_all_ranks_with_one_line(comm, trainer, monkeypatch, capsys):
    import transports

    for what, (flags, machine, says) in MISTAKES.items():
        aware, proven = machine.pop("aware", True), machine.pop("proven", True)
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(transports, "says_gpu_aware", lambda aware=aware: (aware, "this test"))
            patch.setattr(transports, "is_proven", lambda *arguments, proven=proven: proven)
            with pytest.raises(SystemExit) as ended:
                trainer.run("--backend", "cupy", *flags, **machine)
        assert ended.value.code == 2, what
        text = capsys.readouterr().err
        expected = f"error: {says.format(host=trainer.world.host)}" if says.startswith("ranks") else says
        assert comm.rank or (text.count("error: ") == 1 and expected in text), f"{what}: {text}"
        assert comm.rank == 0 or not text, what


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_what_auto_takes(comm, trainer, monkeypatch, capsys):
    """Backend and transport, and the reasons that are recorded; and what MFU is of."""
    import gpu_machine
    import transports

    trainer.run(gpus=None)
    assert trainer.config["settings"]["backend"] == "numpy"
    assert "--backend auto takes numpy: --backend cupy: no GPU" in capsys.readouterr().out or comm.rank
    trainer.run("--n-head", 2)
    assert trainer.config["settings"]["backend"] == "numpy"
    trainer.run()
    assert trainer.config["settings"]["backend"] == "cupy"
    assert trainer.config["settings"]["transport"] == "nccl"
    assert len({gpu["id"] for gpu in trainer.config["gpus"]}) == 2
    printed = capsys.readouterr().out
    assert "GPUs          2: shim" in printed or comm.rank
    assert trainer.config["peak"]["tflops"] is None
    assert printed.count("no MFU: the datasheet of shim is none of those known here; give --peak-tflops") == (
        comm.rank == 0
    )
    monkeypatch.setitem(gpu_machine.PEAK_TFLOPS, "shim", 8)
    trainer.run("--share-gpus", gpus=1)
    assert trainer.config["peak"] == {"tflops": [4, 4], "source": "datasheet of shim, dense bfloat16"}
    assert trainer.config["settings"]["transport"] == "gpu-aware"
    assert "NCCL wants a GPU for each rank" in trainer.config["transport_why"]
    monkeypatch.setattr(transports, "says_gpu_aware", lambda: (False, "this test"))
    trainer.run(nccl=False)
    assert trainer.config["settings"]["transport"] == "host"
    assert "no libnccl.so.2; this MPI says it is not GPU-aware (this test)" in trainer.config["transport_why"]


@pytest.mark.ranks(2)
def test_this_mpi_is_asked_whether_it_is_gpu_aware(comm):
    """The libraries of Python's registry are not; what counts is that asking finds their function and does no harm."""
    from dist.gpu_aware import says_gpu_aware

    aware, source = says_gpu_aware()
    assert source in ("MPIX_Query_cuda_support", "MPIX_GPU_query_support")
    assert len(set(comm.allgather(aware))) == 1


def test_who_shares_a_gpu():
    from gpus import shared_gpus

    places = [{"rank": rank, "host": host} for rank, host in enumerate("aaabb")]
    identities = [{"id": name} for name in ("x", "y", "x", "x", "y")]
    assert shared_gpus(places, identities) == [("a", [0, 2])]
