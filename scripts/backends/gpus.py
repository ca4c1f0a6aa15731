"""The GPU of each rank, by its local rank, and the kernels on it."""

from collections import defaultdict

from gpt2.errors import UserError
from gpt2.kernels import load_kernels
from gpt2.kernels.cupy.attention import assert_head_size
from gpt2.kernels.cupy.device import import_cupy, use_gpu
from gpt2.kernels.cupy.launch import ALIGNED_ELEMENTS
from gpt2.parameters import Parameters
from scripts.machine.gpu import dtype_of, gpu_limits, on_gpu


def own_gpu(local_rank: int) -> int:
    """Return the index of this rank's GPU among those that the process sees. Raise UserError without CuPy.

    If the launcher shows each rank only its own GPU (srun --gpus-per-task=1), the index is 0.
    """
    runtime = import_cupy().cuda.runtime
    try:
        return local_rank % max(1, runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0  # no GPU: the first use reports the reason


def gpu_identity(index: int) -> dict:
    """Return {"name", "id"} and gpu_limits of a GPU. All processes of the node see the same id."""
    cuda = import_cupy().cuda
    bus_id = cuda.Device(index).pci_bus_id
    properties = cuda.runtime.getDeviceProperties(index)
    # MIG instances share a bus id, and CuPy truncates a UUID at its first zero byte: only both together are unique.
    return {
        "name": properties["name"].decode(),
        "id": f"{bus_id}/{properties['uuid'].hex()}",
        **gpu_limits(bus_id),
    }


def shared_gpus(places: list[dict], identities: list[dict]) -> list[tuple[str, list[int]]]:
    """Return (host, ranks) of each GPU that several ranks use. places, identities: indexed by rank."""
    ranks = defaultdict(list)
    for place, identity in zip(places, identities, strict=True):
        ranks[place["host"], identity["id"]].append(place["rank"])
    return [(host, sharers) for (host, _), sharers in ranks.items() if len(sharers) > 1]


def check_sharing(shared: list[tuple[str, list[int]]], allowed: bool) -> None:
    """Raise UserError if ranks share a GPU without --share-gpus."""
    if shared and not allowed:
        host, ranks = shared[0]
        raise UserError(
            f"ranks {', '.join(map(str, ranks))} share one GPU on {host}, expected one each: start as many ranks per "
            "node as it has GPUs, or add --share-gpus"
        )


def gpu_kernels(layout, gpu: int, threads: int, tf32: bool = False):
    """Return CuPy's kernels on this process's GPU `gpu`. Raise UserError if they cannot run or do not fit the model."""
    use_gpu(import_cupy(), gpu)  # first, so that a missing GPU is reported before anything about the model
    assert_head_size(layout.config.head_size)
    assert_aligned(layout)
    kernels = load_kernels("cupy", threads, gpu, tf32)
    kernels.sum_of_squares(kernels.empty((1,)))  # compiles, loads and runs one kernel
    return kernels


def on_own_gpu(kernels, parameters: Parameters, dtype: str = "float32") -> Parameters:
    """Copy host parameters to the kernels' GPU, in float32 or bfloat16. Raise UserError if they do not fit."""
    flat = kernels.empty(parameters.flat.shape, dtype_of(dtype))
    for start, stop in parameters.layout.ranges:
        flat[start:stop] = on_gpu(kernels.device, parameters.flat[start:stop], dtype)
    return Parameters(parameters.layout, flat)


def assert_aligned(layout) -> None:
    """Raise UserError if a tensor of a model shard begins at an address that GPU kernels cannot read."""
    odd = next((each for each in layout.tensors + layout.replicated if each.start % ALIGNED_ELEMENTS), None)
    if odd is not None:
        columns = 4 * layout.config.n_embd
        parts = layout.shard.tp_size
        raise UserError(
            f"--tensor-parallel {parts} splits {columns} feed-forward columns so that {odd.name} begins at "
            f"element {odd.start}, expected parts of a multiple of {ALIGNED_ELEMENTS} on a GPU: choose another "
            "--tensor-parallel, or --backend numpy"
        )
