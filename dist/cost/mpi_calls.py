"""One call of an MPI collective, with the properties that decide which algorithm a library picks."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class CallGroup:
    """A communicator. A place is an index into its members."""

    members: np.ndarray  # ranks in the communicator's order, int64 (count,)
    nodes: np.ndarray  # the node of each member, (count,)

    @property
    def count(self) -> int:
        return len(self.members)

    @cached_property
    def ranks_per_node(self) -> np.ndarray:
        return np.unique(self.nodes, return_counts=True)[1]

    @cached_property
    def leader_places(self) -> np.ndarray:
        """Places of each node's first member, in ascending order."""
        return np.sort(np.unique(self.nodes, return_index=True)[1])

    @cached_property
    def leaders(self) -> "CallGroup":
        return CallGroup(self.members[self.leader_places], self.nodes[self.leader_places])

    @cached_property
    def local_places(self) -> tuple[np.ndarray, np.ndarray]:
        """For every member: (its number among the members of its node, the place of its node's first member)."""
        order = np.argsort(self.nodes, kind="stable")
        first = np.flatnonzero(np.r_[True, np.diff(self.nodes[order]) != 0])
        widths = np.diff(np.r_[first, self.count])
        place, leader = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        place[order] = np.arange(self.count) - np.repeat(first, widths)
        leader[order] = np.repeat(order[first], widths)
        return place, leader


@dataclass(frozen=True)
class MpiCall:
    """A collective call on a vector."""

    library: str  # "mpich" or "openmpi"
    collective: str  # "reduce", "bcast", "ireduce", "ibcast", "allreduce", "reduce_scatter_block" or "allgather"
    group: CallGroup
    size: int  # bytes of the whole vector
    item: int  # bytes of one element
    root: int = 0  # its place in the group
    built_in: bool = True  # whether it adds by MPI's own sum
    after_node_sums: bool = False  # members are leaders, each of which begins after the sum inside its node

    @property
    def members(self) -> np.ndarray:
        return self.group.members

    @property
    def count(self) -> int:
        return self.group.count

    @property
    def from_root(self) -> np.ndarray:
        """The members in their order, beginning with the root."""
        return np.roll(self.members, -self.root)

    @property
    def block(self) -> int:
        """Bytes of one rank's part in a reduce-scatter or all-gather."""
        return self.size // self.count

    @property
    def blocks(self) -> np.ndarray:
        return np.full(self.count, self.block)

    @property
    def power_of_two(self) -> bool:
        return self.count & (self.count - 1) == 0

    @property
    def few_elements(self) -> bool:
        """Whether there are fewer elements than blocks, which are as many as the largest power of two of members."""
        return self.size // self.item < 1 << (self.count.bit_length() - 1)

    @property
    def shares_nodes(self) -> bool:
        """Whether there are several nodes, one of them with several ranks: libraries then go node by node."""
        return 1 < len(self.group.ranks_per_node) < self.count

    @property
    def nodes_alike(self) -> bool:
        return self.shares_nodes and self.group.ranks_per_node.min() == self.group.ranks_per_node.max()

    @property
    def root_node(self) -> int:
        """The place, among the leaders, of the leader on the root's node."""
        return int(np.flatnonzero(self.group.leaders.nodes == self.group.nodes[self.root])[0])

    def among_leaders(self, root: int = 0) -> "MpiCall":
        """Return the same call among the nodes' leaders. root: its place among them."""
        return replace(self, group=self.group.leaders, root=root)
