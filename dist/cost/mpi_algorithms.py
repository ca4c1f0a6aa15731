"""The algorithms behind the MPI libraries' collectives, as stages of messages (stages.py).

Vectors have 1 MB or more, and are cut into equal blocks. mpi_choices.py says which library picks which algorithm. The
algorithms and their costs: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005. Inside a node the libraries use other algorithms: here a binomial tree represents them, and
its time comes from a measured rate (model.Cluster.local_rate).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dist.cost.stages import Stage, backwards, doublings, stage

# UCX sends a smaller vector at once, into buffers of the receiver. A larger vector waits for the receiver's answer.
# Measured over TCP at 400 Mbit/s: a Send to a sleeping rank returned at once up to 3 MB under MPICH 5.0.2 and waited
# from 4 MB on; under Open MPI 5.0.11 it waited from 128 KB on.
RENDEZVOUS_BYTES = {"mpich": 3_500_000, "openmpi": 100_000}
MOST_ROUNDS = 64  # rounds of a pairwise exchange that are modelled one by one


@dataclass(frozen=True)
class MpiCall:
    """A collective call on a vector. A place is an index into `members`."""

    library: str  # "mpich" or "openmpi"
    collective: str  # "reduce", "bcast", "ireduce", "ibcast", "allreduce", "reduce_scatter_block" or "allgather"
    members: np.ndarray  # ranks in the communicator's order, int64 (count,)
    nodes: np.ndarray  # the node of each member, (count,)
    size: int  # bytes of the whole vector
    root: int = 0  # the root's place
    built_in: bool = True  # whether it adds with MPI's built-in MPI_SUM
    after_node_sums: bool = False  # members are leaders; each begins after the sum inside its node

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def block(self) -> int:
        """Bytes of one rank's part in a reduce-scatter or all-gather."""
        return self.size // self.count

    @property
    def from_root(self) -> np.ndarray:
        """The members in their order, beginning with the root."""
        return np.roll(self.members, -self.root)

    @property
    def power_of_two(self) -> bool:
        return self.count & (self.count - 1) == 0

    @cached_property
    def ranks_per_node(self) -> np.ndarray:
        return np.unique(self.nodes, return_counts=True)[1]

    @property
    def shares_nodes(self) -> bool:
        """Whether there are several nodes, some with several ranks: libraries then use hierarchical algorithms."""
        return 1 < len(self.ranks_per_node) < self.count

    @property
    def nodes_alike(self) -> bool:
        return self.shares_nodes and self.ranks_per_node.min() == self.ranks_per_node.max()

    def among_leaders(self) -> "MpiCall":
        """Return the same call among the first members of the nodes; its root is the leader on the root's node."""
        places = np.sort(np.unique(self.nodes, return_index=True)[1])
        nodes = self.nodes[places]
        root = int(np.flatnonzero(nodes == self.nodes[self.root])[0])
        return replace(self, members=self.members[places], nodes=nodes, root=root)

    def waits(self, sent: int) -> bool:
        """Return whether a message of `sent` bytes waits for its receiver."""
        return sent >= RENDEZVOUS_BYTES[self.library]


# Trees.


def linear_reduce(call: MpiCall) -> list[Stage]:
    """Reduce as Open MPI does: the last member sends first."""
    others = np.delete(call.members, call.root)[::-1]
    return [stage(other, call.members[call.root], call.size, added=call.size) for other in others]


def linear_bcast(call: MpiCall) -> list[Stage]:
    return [stage(call.members[call.root], call.members, call.size)]


def linear_scatter(call: MpiCall) -> list[Stage]:
    """Send one block after another, in the order of the members."""
    others = np.delete(call.members, call.root)
    return [stage(call.members[call.root], other, call.block) for other in others]


def chain_reduce(call: MpiCall) -> list[Stage]:
    """Reduce along the chain from the last member to the root, without segments."""
    order = call.from_root
    return [stage(order[place], order[place - 1], call.size, added=call.size) for place in range(call.count - 1, 0, -1)]


def binomial_reduce(call: MpiCall) -> list[Stage]:
    return _trees(call.from_root, np.arange(call.count), call.size)


def local_reduce(call: MpiCall) -> list[Stage]:
    """Sum each node's vectors on its first member."""
    by_node = np.argsort(call.nodes, kind="stable")
    nodes = call.nodes[by_node]
    return _trees(call.members[by_node], np.arange(call.count) - np.searchsorted(nodes, nodes), call.size)


def _trees(ranks: np.ndarray, place: np.ndarray, size: int) -> list[Stage]:
    """Reduce along binomial trees in log2 rounds; in round k odd multiples of 2^k send to the place 2^k lower.

    ranks: tree after tree, each beginning with its root. place: the index of each rank in its tree.
    """
    stages = []
    for distance in doublings(int(place.max()) + 1):
        senders = np.flatnonzero(place % (2 * distance) == distance)
        stages.append(stage(ranks[senders], ranks[senders - distance], size, added=size))
    return stages


def doubling_bcast(call: MpiCall) -> list[Stage]:
    """Broadcast by libnbc's binomial tree: in round k the 2^k members that have the vector send it 2^k further.

    The root and the first member swap places (nbc_ibcast.c).
    """
    order = call.members.copy()
    order[[0, call.root]] = order[[call.root, 0]]
    stages = []
    for distance in doublings(call.count):
        receivers = np.arange(distance, min(2 * distance, call.count))
        stages.append(stage(order[receivers - distance], order[receivers], call.size))
    return stages


def scattered_bcast(call: MpiCall, gather) -> list[Stage]:
    """Broadcast by van de Geijn's algorithm: scatter blocks down a binomial tree, then gather(call) them."""
    from_root = replace(call, members=call.from_root)
    return binomial_scatter(from_root) + gather(from_root)


def binomial_scatter(call: MpiCall) -> list[Stage]:
    """Scatter from the first member: a sender passes on half of its blocks at a time, the farthest half first."""
    stages = []
    for distance in reversed(doublings(call.count)):
        receivers = np.arange(distance, call.count, 2 * distance)
        blocks = np.minimum(distance, call.count - receivers)
        stages.append(stage(call.members[receivers - distance], call.members[receivers], blocks * call.block))
    return stages


# All members send and receive.


def ring_all_gather(call: MpiCall) -> list[Stage]:
    """Gather around a ring: each round, every member passes on the block it received last."""
    return [stage(call.members, np.roll(call.members, -1), call.block, repeat=call.count - 1)]


def pairwise_reduce_scatter(call: MpiCall) -> list[Stage]:
    """Reduce-scatter pairwise: in round i each member sends a block to the i-th member after it.

    If many ranks are placed node by node, all rounds in which no message stays inside a node are alike, and one
    repeated stage represents them. In the middle round, pairs of members exchange with each other; in all other rounds
    a member sends to one member and receives from another.
    """
    count = call.count
    widest = int(call.ranks_per_node.max())
    repeats = dict.fromkeys(range(1, count), 1)  # of each round
    if count > max(2 * widest, MOST_ROUNDS) and np.all(np.diff(call.nodes) >= 0):
        within_nodes = [*range(1, widest), *range(count - widest + 1, count)]
        repeats = dict.fromkeys(within_nodes, 1) | {widest: count - 2 * widest + 1}
    stages = []
    for shift, repeat in repeats.items():
        apart = 2 * shift == count and call.waits(call.block)
        receivers = np.roll(call.members, -shift)
        stages.append(stage(call.members, receivers, call.block, added=call.block, exchange_apart=apart, repeat=repeat))
    return stages


def bruck_all_gather(call: MpiCall) -> list[Stage]:
    """Gather by Bruck: in round k all send their blocks 2^k members back; in the last round only the missing blocks."""
    return [
        stage(call.members, np.roll(call.members, distance), call.block * min(distance, call.count - distance))
        for distance in doublings(call.count)
    ]


def doubling_all_gather(call: MpiCall) -> list[Stage]:
    """Gather by recursive doubling: pairs exchange all their blocks. The members are a power of two."""
    return [
        _exchange(call.members, distance, call.block * distance, exchange_apart=call.waits(call.block * distance))
        for distance in doublings(call.count)
    ]


def _exchange(members: np.ndarray, distance: int, size: int, **properties) -> Stage:
    """Exchange `size` bytes between members at this distance, a power of two, in the hypercube of all members."""
    return stage(members, members[np.arange(len(members)) ^ distance], size, **properties)


def doubling_allreduce(call: MpiCall) -> list[Stage]:
    """Sum by recursive doubling of whole vectors. Members beyond a power of two are folded, and get the sum last."""
    core, fold = folded(call.members, keep=1)
    apart = len(fold) > 0
    pairs = [
        _exchange(core, distance, call.size, added=call.size, exchange_apart=apart) for distance in doublings(len(core))
    ]
    return _fold(call, fold) + pairs + _unfold(call, fold)


def folded(members: np.ndarray, keep: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (the members that stay, a power of two; pairs of (folded member, its partner), (K, 2)).

    The first 2 K members are pairs of neighbours. keep: which of a pair stays, the first (0) or the second (1).
    """
    rest = len(members) - (1 << (len(members).bit_length() - 1))
    pairs = members[: 2 * rest].reshape(rest, 2)
    core = np.concatenate([pairs[:, keep], members[2 * rest :]])
    return core, np.stack([pairs[:, 1 - keep], pairs[:, keep]], axis=1)


def _fold(call: MpiCall, fold: np.ndarray) -> list[Stage]:
    """Add the vectors of the folded members to those of their partners. fold: (K, 2), from `folded`.

    MPICH sends whole vectors. Under Open MPI each of the two adds one half; the partner collects both.
    """
    if not len(fold):
        return []
    if call.library == "mpich":
        return [stage(fold[:, 0], fold[:, 1], call.size, added=call.size)]
    half = call.size // 2
    both_ways = stage(fold, fold[:, ::-1], half, added=half, exchange_apart=call.waits(call.size))
    return [both_ways, stage(fold[:, 0], fold[:, 1], half)]


def _unfold(call: MpiCall, fold: np.ndarray) -> list[Stage]:
    return [stage(fold[:, 1], fold[:, 0], call.size)] if len(fold) else []


# Rabenseifner's algorithms: recursive halving, then a gather to the root, or the halving in reverse.


def rabenseifner_reduce(call: MpiCall) -> list[Stage]:
    core, fold = folded(call.members, keep=0)
    in_step = 0 if call.after_node_sums else 1
    stages = _fold(call, fold) + _halving(call, core, len(fold) > 0, in_step)
    root = call.members[call.root]
    if root not in core:  # the first core member hands its block to the root, which takes its place
        stages.append(stage(core[0], root, call.size // len(core)))
        core = np.concatenate([[root], core[1:]])
    from_root = np.arange(len(core)) ^ int(np.flatnonzero(core == root)[0])
    for distance in reversed(doublings(len(core))):
        senders = np.flatnonzero(from_root // distance == 1)
        stages.append(stage(core[senders], core[senders ^ distance], call.size // (2 * distance)))
    return stages


def rabenseifner_allreduce(call: MpiCall) -> list[Stage]:
    core, fold = folded(call.members, keep=0 if call.library == "openmpi" else 1)
    apart = call.waits(call.size) and (call.library == "openmpi" or len(fold) == 0)
    gather = [
        _exchange(core, distance, call.size // (2 * distance), exchange_apart=apart)
        for distance in reversed(doublings(len(core)))
    ]
    return [*_fold(call, fold), *_halving(call, core, len(fold) > 0), *gather, *_unfold(call, fold)]


def _halving(call: MpiCall, core: np.ndarray, is_folded: bool, in_step: int = 1) -> list[Stage]:
    """Reduce-scatter by recursive halving among a power of two of members, neighbours first.

    If vectors wait for their receivers, some pairs begin their exchange at different times. Measurements show which.
    Under Open MPI all do. Under MPICH a fold delays half of the members; without a fold, the first `in_step` exchanges
    are in step, and then adding drives the pairs apart if their messages wait for the receiver.
    """
    stages = []
    for number, distance in enumerate(doublings(len(core))):
        sent = call.size // (2 * distance)
        apart = call.library == "openmpi" or is_folded or (number >= in_step and call.waits(sent))
        stages.append(_exchange(core, distance, sent, added=sent, exchange_apart=apart and call.waits(call.size)))
    return stages


# Node by node.


def smp(call: MpiCall, resolve) -> tuple[list[Stage], list[str]]:
    """Return MPICH's SMP-aware collective: inside the nodes, among their leaders, inside the nodes again.

    resolve(call): returns (stages, names) of the leaders' call, for which the library picks an algorithm separately.
    """
    leaders = call.among_leaders()
    if call.collective in ("reduce", "allreduce"):
        # Port counters show that the leaders reduce to rank 0's node for any root; the sum then goes on to the root.
        leaders = replace(leaders, root=0, after_node_sums=True)
    root = call.members[call.root]
    root_leader = leaders.members[leaders.root]
    middle, names = resolve(leaders)
    if call.collective in ("bcast", "ibcast"):
        return [stage(root, root_leader, call.size), *middle, *backwards(local_reduce(call))], names
    after = [stage(root_leader, root, call.size)]
    if call.collective == "allreduce":
        after = backwards(local_reduce(call))
    return local_reduce(call) + middle + after, names


def han(call: MpiCall) -> list[Stage]:
    """Return Open MPI's HAN: segments of 64 KiB, so that node sum, leaders' exchange and node broadcast overlap.

    Among the leaders it calls libnbc. Port counters showed the algorithms for 3, 4 and 5 leaders; more leaders are
    assumed to use the same as 5.
    """
    leaders = call.among_leaders()
    parts = []
    if call.collective != "bcast":
        parts += rabenseifner_reduce(leaders)
    if call.collective != "reduce":
        parts += linear_bcast(leaders) if leaders.count <= 4 else doubling_bcast(leaders)
    # One stage of all messages represents a pipeline of small segments.
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("source", "destination", "size")]
    return [stage(*joined, steps=len(parts), all_together=True)]


def han_all_gather(call: MpiCall) -> list[Stage]:
    """Collect blocks on the leaders, gather them among the leaders, and broadcast them in each node."""
    leaders = call.among_leaders()
    _, first, node = np.unique(call.nodes, return_index=True, return_inverse=True)
    collect = stage(call.members, call.members[first[node]], call.block)
    middle = doubling_all_gather(leaders) if leaders.power_of_two else bruck_all_gather(leaders)
    return [collect, *middle, *backwards(local_reduce(call))]
