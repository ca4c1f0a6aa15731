"""Seconds of an exchange, from its messages and the measured or nominal rates of the nodes' ports.

Stages of messages (stages.py) are replayed, each rank going through them at its own pace (replay.py):
ranks of one node share a port, a rooted or blocking call keeps one port busy while others wait, and who is done early
begins the next call. Pipelines of segments, in which nobody gets ahead, last as long as their busiest port, each
direction by itself, plus a latency for each dependent step. Where there are too many messages to replay, every stage
is taken so, one after another: the alpha-beta-gamma model of Thakur et al. (mpi_algorithms.py) with the node's port in
the rank's place.

Left out: chance (MPICH's Allreduce of 8 MB on 4 hosts took 0.28 to 0.59 s), and waiting for a core where ranks that
spin outnumber the cores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dist.cost.messages import FLOAT32_BYTES, Messages, Setting, message_schedule
from dist.cost.mpi_algorithms import RENDEZVOUS_BYTES
from dist.cost.ports import Links
from dist.cost.replay import replay_seconds
from dist.cost.sparse_rows import Rows, SparseMessages
from dist.cost.stages import Stage, node_traffic

# An Ethernet frame of 1514 bytes, and 24 around it that only the wire sees, carries 1448 of TCP's data; a shaper that
# sees 1514 makes it 1.045 of the time, and so did every long transfer on the virtual cluster.
TCP_HEADERS = 1514 / 1448
# A replay takes some microseconds for each turn of a message in a port's queue and each message under way beside it.
MOST_REPLAYED = 500_000  # messages times ranks
MOST_TURNS = 2_500_000  # times ranks: of more bytes, more are served in a turn


@dataclass(frozen=True)
class Cluster:
    """Ranks, nodes, and how fast bytes move.

    placement: node of each rank; rate_in, rate_out: bytes/s of the nodes' ports, one number or one a node; latency_s:
    of one message between nodes, software included. tcp: the two of a pair share one TCP connection, see above.
    nominal: the rates are the links' own, of which TCP/IP's headers take their part; else they are what a transfer of
    plain bytes reached. local_rate, local_reduce_rate: bytes/s at which an MPI call moves, or sums, a vector between
    two ranks of a node; add_rate: at which a rank adds what came over the network. Where ranks share cores these three
    differ much from the defaults, a free core's: measure them. queue_bytes: of one message that a port takes in before
    it serves the next, TCP's window and the port's queue: 0.5 MB explains the times on the virtual cluster best.
    """

    placement: list[int]
    rate_in: float | np.ndarray
    rate_out: float | np.ndarray
    latency_s: float
    tcp: bool = True
    nominal: bool = True
    local_rate: float = 5e9
    local_reduce_rate: float = 2.5e9
    add_rate: float = 5e9
    queue_bytes: float = 5e5

    @property
    def nodes(self) -> int:
        return int(np.max(self.placement)) + 1

    def port_seconds(self, rates: float | np.ndarray) -> np.ndarray:
        """Seconds a byte takes through each port, (nodes,)."""
        return np.broadcast_to((TCP_HEADERS if self.nominal else 1.0) / np.asarray(rates, float), self.nodes)


@dataclass(frozen=True)
class Prediction:
    """seconds; bytes_in, bytes_out: int64 (nodes,); steps: messages that wait for one another; bound_s: an
    allreduce's lower bound 2 (M-1)/M D/B at the slowest port's rate; algorithms: the MPI library's, by name.
    """

    seconds: float
    bytes_in: np.ndarray
    bytes_out: np.ndarray
    steps: int
    bound_s: float
    algorithms: list[str]

    def __add__(self, other: "Prediction") -> "Prediction":
        """One exchange after another; the bound is the first one's."""
        return Prediction(
            self.seconds + other.seconds, self.bytes_in + other.bytes_in, self.bytes_out + other.bytes_out,
            self.steps + other.steps, self.bound_s, self.algorithms + other.algorithms,
        )  # fmt: skip


def predict(
    messages: Callable[[Setting], Messages],
    cluster: Cluster,
    size_bytes: int,
    library: str = "mpich",
    item_bytes: int = FLOAT32_BYTES,
    ranges: tuple[int, ...] = (),
    micro_steps: int = 1,
    own_operation: bool = False,
) -> Prediction:
    """What a step exchanges, a vector of size_bytes as it travels. Arguments and errors are message_schedule's.

    A dedicated server changes nothing here: it takes part in every call, as the other ranks do.
    """
    stages, algorithms = message_schedule(
        messages, cluster.placement, size_bytes, library, item_bytes, ranges, micro_steps, own_operation
    )
    return _prediction(stages, cluster, library, lower_bound_s(cluster, size_bytes), algorithms)


def predict_rows(messages: SparseMessages, cluster: Cluster, rows: Rows, library: str = "mpich") -> Prediction:
    """Of looked-up rows that travel apart from their table."""
    stages = messages(np.asarray(cluster.placement), rows) if len(cluster.placement) > 1 else []
    return _prediction(stages, cluster, library, 0.0, [])


def _prediction(stages, cluster: Cluster, library: str, bound_s: float, algorithms: list[str]) -> Prediction:
    into, out = node_traffic(stages, cluster.placement)
    steps = sum(stage.steps * stage.repeat for stage in stages)
    return Prediction(exchange_seconds(stages, cluster, library), into, out, steps, bound_s, algorithms)


def lower_bound_s(cluster: Cluster, size_bytes: int) -> float:
    """2 (M-1)/M D/B: every node takes in and sends out that much in an allreduce without help from the switch."""
    slowest = min(np.min(cluster.rate_in), np.min(cluster.rate_out))
    return float(2 * (cluster.nodes - 1) / cluster.nodes * size_bytes / slowest)


def exchange_seconds(stages: list[Stage], cluster: Cluster, library: str) -> float:
    """All stages: those between two that hold all ranks together are replayed. library: whose protocols they use."""
    ranks = len(cluster.placement)
    if ranks * sum(len(stage.size) for stage in stages if not stage.all_together) > MOST_REPLAYED:
        return float(sum(stage_seconds(stage, cluster) for stage in stages))
    replayed = sum(stage.repeat * float(stage.size.sum()) for stage in stages if not stage.all_together)
    links = links_of(cluster, library, replayed * ranks / MOST_TURNS)
    seconds = 0.0
    for together, some in groupby(stages, lambda stage: stage.all_together):
        if together:
            seconds += sum(stage_seconds(stage, cluster) for stage in some)
        else:
            seconds += replay_seconds([stage for stage in some for _ in range(stage.repeat)], links)
    return float(seconds)


def links_of(cluster: Cluster, library: str, least_queue_bytes: float = 0.0) -> Links:
    """What messages of the library travel over. least_queue_bytes: where there are too many to be served as finely as
    the cluster's ports do."""
    return Links(
        np.asarray(cluster.placement), cluster.port_seconds(cluster.rate_in), cluster.port_seconds(cluster.rate_out),
        cluster.latency_s, 1 / cluster.local_rate, 1 / cluster.local_reduce_rate, 1 / cluster.add_rate,
        RENDEZVOUS_BYTES[library], max(cluster.queue_bytes, least_queue_bytes), cluster.tcp,
    )  # fmt: skip


def stage_seconds(stage: Stage, cluster: Cluster) -> float:
    """All messages of one stage, its repeats included, every rank at it from its start to its end."""
    nodes = np.asarray(cluster.placement)
    sizes = stage.size * (nodes[stage.source] != nodes[stage.destination])
    in_s, out_s = cluster.port_seconds(cluster.rate_in), cluster.port_seconds(cluster.rate_out)
    into = np.bincount(nodes[stage.destination], sizes, cluster.nodes) * in_s
    out = np.bincount(nodes[stage.source], sizes, cluster.nodes) * out_s
    least_s, after_s = beside_ports(stage, cluster)
    seconds = max(into.max(), out.max(), least_s)
    if stage.exchange_apart and cluster.tcp:
        one_way = np.bincount(stage.destination, sizes, len(nodes)) * in_s[nodes]
        other_way = np.bincount(stage.source, sizes, len(nodes)) * out_s[nodes]
        seconds = max(seconds, (one_way + other_way).max())
    return stage.repeat * (seconds + after_s)


def beside_ports(stage: Stage, cluster: Cluster) -> tuple[float, float]:
    """(seconds that the stage takes at least, inside nodes and to add; seconds on top of what its ports need)."""
    nodes = np.asarray(cluster.placement)
    crosses = nodes[stage.source] != nodes[stage.destination]
    local_rate = cluster.local_reduce_rate if stage.added else cluster.local_rate
    local_s = np.bincount(stage.destination, stage.size * ~crosses, len(nodes)).max() / local_rate
    after_s = stage.steps * cluster.latency_s + stage.added / cluster.add_rate if crosses.any() else 0.0
    return max(local_s, stage.added_meanwhile / cluster.add_rate), after_s
