"""The MPI collectives by which other tools show our exchanges, and their sizes."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ExportedCollective:
    """An MPI collective, and the part of the vector that a rank sends and receives.

    "none", "all", "share" (1/N), "root" (all on the root, none elsewhere), "others" (none on the root, all elsewhere).
    """

    label: str
    sends: str
    receives: str

    def sizes(self, bytes: np.ndarray, at_root: bool, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the (sent, received) bytes of a rank. bytes: of the calls' vectors; ranks: how many take part."""
        parts = {"none": 0 * bytes, "all": bytes, "share": bytes // ranks}
        parts["root"] = parts["all" if at_root else "none"]
        parts["others"] = parts["none" if at_root else "all"]
        return parts[self.sends], parts[self.receives]


BCAST = ExportedCollective("MPI_Bcast", "root", "others")
BARRIER = ExportedCollective("MPI_Barrier", "none", "none")
REDUCE = ExportedCollective("MPI_Reduce", "all", "root")
ALLREDUCE = ExportedCollective("MPI_Allreduce", "all", "all")
ALLGATHER = ExportedCollective("MPI_Allgather", "share", "all")
REDUCE_SCATTER = ExportedCollective("MPI_Reduce_scatter_block", "all", "share")

# (without a root, with one). A reduce without a root reduces a slice to each rank: MPI's reduce-scatter.
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
