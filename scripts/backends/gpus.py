"""Which GPU each rank computes on: one for each local rank, in their order."""

from collections import defaultdict

from gpt2.errors import UserError
from gpt2.kernels.cupy.device import import_cupy


def own_gpu(local_rank: int) -> int:
    """The index of this rank's GPU among those that the process sees; UserError without CuPy.

    A launcher that shows each rank its own GPU alone (srun --gpus-per-task=1) has chosen already: index 0.
    """
    runtime = import_cupy().cuda.runtime
    try:
        return local_rank % max(1, runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0  # there is none: whoever opens it says why


def gpu_identity(index: int) -> dict[str, str]:
    """{"name", "id"} of a GPU of this process; the id is the same in all processes of the node."""
    cuda = import_cupy().cuda
    properties = cuda.runtime.getDeviceProperties(index)
    # Parts of one GPU (MIG) share the bus, and CuPy cuts an UUID at its first zero byte: only both together are unique.
    return {
        "name": properties["name"].decode(),
        "id": f"{cuda.Device(index).pci_bus_id}/{properties['uuid'].hex()}",
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
