"""An invented job for the tests of doctor.py: the facts that its ranks would find, and ways to spoil them."""

GB = 10**9
MPICH = {"path": "/opt/mpich/bin/mpirun", "where": "on PATH", "family": "MPICH", "version": "5.0.2"}
OPEN_MPI = {"path": "/usr/bin/mpirun", "where": "on PATH", "family": "Open MPI", "version": "5.0.11"}


def rank_facts(rank: int, ranks_per_node: int = 2, nodes: int = 4) -> dict:
    """What a rank of a healthy job finds: 4 nodes with 8 cores, 2 GPUs and InfiniBand each, a rank a GPU."""
    node, local_rank = divmod(rank, ranks_per_node)
    return {
        "place": {
            "rank": rank, "size": ranks_per_node * nodes, "node": node, "nodes": nodes, "host": f"node{node}",
            "local_rank": local_rank, "local_size": ranks_per_node,
        },
        "errors": {},
        "software": {
            "versions": {
                "python": "3.12.3", "mpi4py": "4.1.2", "numpy": "2.4.6", "numba": "0.68.1", "threadpoolctl": "3.8.0",
                "tiktoken": "0.14.0", "gpt2-mpi": "0.1.0",
            },
            "interpreter": "/venv/bin/python", "source": "01234567" if local_rank == 0 else None,
        },
        "MPI": {"library": "MPICH 5.0.2", "family": "MPICH"},
        "launcher": {"mpiruns": [dict(MPICH)]},
        "BLAS": {"text": "OpenBLAS 0.3.31, Zen kernels", "variables": {}, "unused": None},
        "cores": {
            "affinity": list(range(4 * local_rank, 4 * local_rank + 4)), "count": 8, "quota": None,
            "variables": {"OMP_NUM_THREADS": "4"},
        },
        "memory": {"total": 64 * GB, "free": 60 * GB, "limit": None},
        "shared memory": {"folder": "/dev/shm", "free": 32 * GB, "left": []},
        "run folder": {"path": "runs", "place": "/shared", "free": 900 * GB, "problem": None},
        "GPUs": {
            "listed": [{"name": "H200", "driver": "580.1"}] * 2
            if local_rank == 0 else [],
            "driver": "580.1", "variables": {},
        },
        "own GPU": {
            "cupy": "14.0", "count": 2, "problem": None, "runtime_cuda": 13000, "driver_cuda": 13010,
            "index": local_rank, "name": "H200", "id": f"0000:0{local_rank}", "free": 140 * GB,
            "total": 141 * GB, "nccl_missing": None, "mpi_is_gpu_aware": False, "cudnn": 91002, "cublaslt": 130100,
            "power_w": 700, "default_power_w": 700, "clock_mhz": 1980, "default_clock_mhz": 1980,
        },
        "threads": 4,
        "speed": 90e9 + rank * 1e8,
        "link": {"node": node, "host": f"node{node}", "latency_s": 2e-6, "out": 11e9, "in": 11e9, "both": 10e9},
        "traffic": {"eth0": 20_000, "mlx5_0:1": 10**9},
        "sees run folder": True,
    }  # fmt: skip


def healthy(**shape) -> list[dict]:
    count = shape.get("ranks_per_node", 2) * shape.get("nodes", 4)
    return [rank_facts(rank, **shape) for rank in range(count)]


def put(facts: dict, path: str, value) -> None:
    """facts["a"]["b"] = value for the path "a/b"."""
    *folders, name = path.split("/")
    for folder in folders:
        facts = facts[folder]
    facts[name] = value


def change(path: str, value, *where: int):
    """A change of the healthy facts: of these ranks, or of all."""

    def apply(ranks):
        for rank in where or range(len(ranks)):
            put(ranks[rank], path, value)

    return apply


def changes(*several):
    def apply(ranks):
        for one in several:
            one(ranks)

    return apply


def error(section: str, text: str, *where: int):
    def apply(ranks):
        for rank in where or range(len(ranks)):
            ranks[rank]["errors"][section] = text
            ranks[rank].pop(section, None)

    return apply


def keep(count: int, **place):
    """Only the first ranks."""

    def apply(ranks):
        del ranks[count:]
        for facts in ranks:
            facts["place"].update(size=count, **place)

    return apply


NODE_1 = (2, 3)  # its ranks
NO_GPU = {"cupy": "14.0", "count": 0, "problem": None}
ONE_CORE = {"affinity": [0], "count": 8, "quota": None, "variables": {}}
ALL_CORES = {"affinity": list(range(8)), "count": 8, "quota": None, "variables": {}}
WITHOUT_GPUS = changes(change("own GPU", NO_GPU), change("GPUs/listed", []))
ANY_CORE = changes(change("cores", ALL_CORES), WITHOUT_GPUS)
ALONE = changes(keep(1, nodes=1, local_size=1), ANY_CORE)
LINK = {"node": 1, "host": "node1", "latency_s": 2e-6, "out": 11e9, "in": 11e9, "both": 10e9}
