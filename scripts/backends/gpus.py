"""Which GPU each rank computes on, one for each local rank in their order, and its kernels."""

from collections import defaultdict

from gpt2.errors import UserError
from gpt2.kernels import load_kernels
from gpt2.kernels.cupy.attention import assert_head_size
from gpt2.kernels.cupy.device import import_cupy, use_gpu
from gpt2.kernels.cupy.launch import ALIGNED_ELEMENTS
from gpt2.parameters import Parameters
from scripts.machine.gpu import dtype_of, gpu_limits, on_gpu


def own_gpu(local_rank: int) -> int:
    """The index of this rank's GPU among those that the process sees; UserError without CuPy.

    A launcher that shows each rank its own GPU alone (srun --gpus-per-task=1) has chosen already: index 0.
    """
    runtime = import_cupy().cuda.runtime
    try:
        return local_rank % max(1, runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0  # there is none: whoever opens it says why


def gpu_identity(index: int) -> dict:
    """{"name", "id"} of a GPU of this process, and gpu_limits; the id is the same in all processes of the node."""
    cuda = import_cupy().cuda
    bus_id, properties = cuda.Device(index).pci_bus_id, cuda.runtime.getDeviceProperties(index)
    # Parts of one GPU (MIG) share the bus, and CuPy cuts an UUID at its first zero byte: only both together are unique.
    return {
        "name": properties["name"].decode(),
        "id": f"{bus_id}/{properties['uuid'].hex()}",
        **gpu_limits(bus_id),
    }


def shared_gpus(places: list[dict], identities: list[dict]) -> list[tuple[str, list[int]]]:
    """(host, ranks) of each GPU that more than one rank has; both lists by rank."""
    ranks = defaultdict(list)
    for place, identity in zip(places, identities, strict=True):
        ranks[place["host"], identity["id"]].append(place["rank"])
    return [(host, sharers) for (host, _), sharers in ranks.items() if len(sharers) > 1]


def check_sharing(shared: list[tuple[str, list[int]]], allowed: bool) -> None:
    """UserError if ranks share a GPU and were not meant to."""
    if shared and not allowed:
        host, ranks = shared[0]
        raise UserError(
            f"ranks {', '.join(map(str, ranks))} have one GPU on {host}, expected one each: start as many ranks a node "
            "as it has GPUs, or say --share-gpus"
        )


def gpu_kernels(layout, gpu: int, threads: int, tf32: bool = False):
    """CuPy's kernels on the `gpu`-th GPU of this process; UserError where they do not run, or not with this model."""
    use_gpu(import_cupy(), gpu)  # first: where there is none, nothing of the model is in the way
    assert_head_size(layout.config.head_size)
    assert_aligned(layout)
    kernels = load_kernels("cupy", threads, gpu, tf32)
    kernels.sum_of_squares(kernels.empty((1,)))  # compiles, loads and runs one
    return kernels


def on_own_gpu(kernels, parameters: Parameters, dtype: str = "float32") -> Parameters:
    """A copy of parameters in host memory on the kernels' GPU, in float32 or bfloat16. UserError: they do not fit."""
    flat = kernels.empty(parameters.flat.shape, dtype_of(dtype))
    for start, stop in parameters.layout.ranges:
        flat[start:stop] = on_gpu(kernels.device, parameters.flat[start:stop], dtype)
    return Parameters(parameters.layout, flat)


def assert_aligned(layout) -> None:
    """UserError where a tensor of a piece begins where no GPU kernel can read it."""
    odd = next((each for each in layout.tensors + layout.replicated if each.start % ALIGNED_ELEMENTS), None)
    if odd is not None:
        columns, parts = 4 * layout.config.n_embd, layout.shard.tp_size
        raise UserError(
            f"--tensor-parallel {parts} cuts {columns} columns of the feed-forward block so that {odd.name} begins at "
            f"element {odd.start}, expected parts of a multiple of {ALIGNED_ELEMENTS} on a GPU: choose another "
            "--tensor-parallel, or --backend numpy"
        )
