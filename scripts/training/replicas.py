"""Whether all ranks still hold the same parameters: what a fault of memory or network would change unseen."""

import zlib
from collections import Counter

from dist.world import end_with_one_line


def check_replicas(world, ranges, flat, step: int) -> None:
    """End the job where ranks' parameters differ, naming those that differ from most others. Collective.

    ranges: the layout's, each given when its parameters are in `flat`, in host memory.
    """
    checksum = 0
    for start, stop in ranges:
        checksum = zlib.crc32(flat[start:stop], checksum)
    found = world.comm.allgather(checksum)
    if ranks := apart(found):
        names = ", ".join(f"rank {rank} on {world.places[rank]['host']}" for rank in ranks)
        text = f"after step {step} these hold other parameters than the rest: {names}: go on with --resume, elsewhere"
        end_with_one_line(world.comm, text)


def apart(checksums: list[int]) -> list[int]:
    """The ranks whose checksum is not the most frequent one; of two as frequent, that of the lowest rank counts."""
    (usual, _), *_ = Counter(checksums).most_common()
    return [rank for rank, checksum in enumerate(checksums) if checksum != usual]
