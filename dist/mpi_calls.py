"""One call of an MPI collective, with what a library looks at when it picks an algorithm for it."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Call:
    """collective: "reduce", "bcast", "allreduce", "reduce_scatter_block" or "allgather" of `size` bytes in all.

    members: the ranks in their order in the communicator, int64 (count,); nodes: where each sits, (count,); item:
    bytes of one element; root: an index into members.
    """

    library: str
    collective: str
    members: np.ndarray
    nodes: np.ndarray
    size: int
    item: int
    root: int = 0

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def block(self) -> int:
        """Bytes of one rank's part in a reduce-scatter or all-gather."""
        return self.size // self.count

    @property
    def power_of_two(self) -> bool:
        return self.count & (self.count - 1) == 0

    @property
    def few_elements(self) -> bool:
        """Fewer than the ranks that would each get a block."""
        return self.size // self.item < 1 << (self.count.bit_length() - 1)

    @cached_property
    def ranks_per_node(self) -> np.ndarray:
        return np.bincount(np.unique(self.nodes, return_inverse=True)[1])

    @property
    def shares_nodes(self) -> bool:
        """Several nodes, and several ranks on one of them: what libraries treat node by node."""
        return 1 < len(self.ranks_per_node) < self.count

    @property
    def nodes_alike(self) -> bool:
        return self.shares_nodes and self.ranks_per_node.min() == self.ranks_per_node.max()

    @cached_property
    def leaders(self) -> np.ndarray:
        """Indices of each node's first member, in the order of the nodes' first members."""
        return np.sort(np.unique(self.nodes, return_index=True)[1])

    def among_leaders(self, root: int = 0) -> "Call":
        """The same call, one rank a node; root: an index into the leaders."""
        return replace(self, members=self.members[self.leaders], nodes=self.nodes[self.leaders], root=root)

    @property
    def root_node(self) -> int:
        """Index, into the leaders, of the root's node."""
        return int(np.flatnonzero(self.nodes[self.leaders] == self.nodes[self.root])[0])
