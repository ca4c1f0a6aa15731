"""What exchanges are called in the formats of other tools: the MPI collective of the same meaning, and its sizes."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Collective:
    """An MPI collective, and the part of the vector that a rank sends and receives.

    none, all, share (1/N), root (all on the root, none elsewhere), others (the reverse).
    """

    label: str
    sends: str
    receives: str

    def sizes(self, bytes: np.ndarray, at_root: bool, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """(sent, received) by one rank, in calls that exchange vectors of so many bytes each among so many ranks."""
        return tuple(_part(rule, bytes, at_root, ranks) for rule in (self.sends, self.receives))


def _part(rule: str, sizes: np.ndarray, at_root: bool, ranks: int) -> np.ndarray:
    whole = {"none": False, "all": True, "share": True, "root": bool(at_root), "others": not at_root}[rule]
    return sizes * whole // (ranks if rule == "share" else 1)


BCAST = Collective("MPI_Bcast", "root", "others")
BARRIER = Collective("MPI_Barrier", "none", "none")
REDUCE = Collective("MPI_Reduce", "all", "root")
ALLREDUCE = Collective("MPI_Allreduce", "all", "all")
ALLGATHER = Collective("MPI_Allgather", "share", "all")
REDUCE_SCATTER = Collective("MPI_Reduce_scatter_block", "all", "share")

# Without a root, with one. A reduce without is many of them, a slice to each rank: what MPI calls a reduce-scatter.
COLLECTIVE_OF = {
    "reduce": (REDUCE_SCATTER, REDUCE),
    "bcast": (ALLGATHER, BCAST),
    "reduce_scatter": (REDUCE_SCATTER, REDUCE_SCATTER),
    "allreduce": (ALLREDUCE, ALLREDUCE),
    "allgather": (ALLGATHER, ALLGATHER),
    "tensor": (ALLREDUCE, ALLREDUCE),
    "norm": (ALLREDUCE, ALLREDUCE),
    "wait": (BARRIER, BARRIER),
}
