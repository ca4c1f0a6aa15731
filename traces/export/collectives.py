"""The MPI collectives as which other tools show our exchanges, and the bytes that each rank sends and receives."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ExportedCollective:
    """An MPI collective, and the part of the vector that a rank sends and receives.

    "none", "all", "share" (1/N), "root" (all on the root, none elsewhere), "others" (none on the root, all elsewhere).
    number: of the collective in Extrae. operation, role: its names in OTF2.
    """

    label: str
    sends: str
    receives: str
    number: int
    operation: str
    role: str

    def sizes(self, bytes: np.ndarray, at_root: bool, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the (sent, received) bytes of a rank. bytes: of each call's vector; ranks: how many take part."""
        parts = {"none": 0 * bytes, "all": bytes, "share": bytes // ranks}
        parts["root"] = parts["all" if at_root else "none"]
        parts["others"] = parts["none" if at_root else "all"]
        return parts[self.sends], parts[self.receives]


BCAST = ExportedCollective("MPI_Bcast", "root", "others", 7, "BCAST", "COLL_ONE2ALL")
BARRIER = ExportedCollective("MPI_Barrier", "none", "none", 8, "BARRIER", "BARRIER")
REDUCE = ExportedCollective("MPI_Reduce", "all", "root", 9, "REDUCE", "COLL_ALL2ONE")
ALLREDUCE = ExportedCollective("MPI_Allreduce", "all", "all", 10, "ALLREDUCE", "COLL_ALL2ALL")
ALLGATHER = ExportedCollective("MPI_Allgather", "share", "all", 17, "ALLGATHER", "COLL_ALL2ALL")
REDUCE_SCATTER = ExportedCollective(
    "MPI_Reduce_scatter_block", "all", "share", 168, "REDUCE_SCATTER_BLOCK", "COLL_ALL2ALL"
)
COLLECTIVES = (BCAST, BARRIER, REDUCE, ALLREDUCE, ALLGATHER, REDUCE_SCATTER)

# {phase: (without a root, with a root)}. Without a root, a reduce reduces a slice to each rank: MPI's reduce-scatter.
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
