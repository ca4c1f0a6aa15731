"""One call of an MPI collective, with what a library looks at when it picks an algorithm for it."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Group:
    """A communicator: members, the ranks in its order, int64 (count,); nodes: where each of them sits, (count,)."""

    members: np.ndarray
    nodes: np.ndarray

    @property
    def count(self) -> int:
        return len(self.members)

    @cached_property
    def ranks_per_node(self) -> np.ndarray:
        return np.unique(self.nodes, return_counts=True)[1]

    @cached_property
    def leader_places(self) -> np.ndarray:
        """Indices of each node's first member, in their order."""
        return np.sort(np.unique(self.nodes, return_index=True)[1])

    @cached_property
    def leaders(self) -> "Group":
        return Group(self.members[self.leader_places], self.nodes[self.leader_places])

    @cached_property
    def local_places(self) -> tuple[np.ndarray, np.ndarray]:
        """(number among the members of its node, index of its node's first member), of every member."""
        order = np.argsort(self.nodes, kind="stable")
        first = np.flatnonzero(np.r_[True, np.diff(self.nodes[order]) != 0])
        widths = np.diff(np.r_[first, self.count])
        place, leader = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        place[order] = np.arange(self.count) - np.repeat(first, widths)
        leader[order] = np.repeat(order[first], widths)
        return place, leader


@dataclass(frozen=True)
class Call:
    """collective: "reduce", "bcast", "allreduce", "reduce_scatter_block" or "allgather" of `size` bytes in all.

    library: "mpich" or "openmpi"; item: bytes of one element; root: an index into the group's members.
    after_node_sums: the members are leaders that come from sums inside their nodes, each when its own is done.
    """

    library: str
    collective: str
    group: Group
    size: int
    item: int
    root: int = 0
    after_node_sums: bool = False

    @property
    def members(self) -> np.ndarray:
        return self.group.members

    @property
    def count(self) -> int:
        return self.group.count

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

    @property
    def shares_nodes(self) -> bool:
        """Several nodes, and several ranks on one of them: what libraries treat node by node."""
        return 1 < len(self.group.ranks_per_node) < self.count

    @property
    def nodes_alike(self) -> bool:
        return self.shares_nodes and self.group.ranks_per_node.min() == self.group.ranks_per_node.max()

    @property
    def root_node(self) -> int:
        """Index, among the leaders, of the leader on the root's node."""
        return int(np.flatnonzero(self.group.leaders.nodes == self.group.nodes[self.root])[0])

    def among_leaders(self, root: int = 0) -> "Call":
        """The same call, one rank a node; root: an index into the leaders."""
        return replace(self, group=self.group.leaders, root=root)
