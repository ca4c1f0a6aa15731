"""Predict the seconds of an exchange from its messages and the measured or nominal rates of the nodes' ports.

Stages of messages (stages.py) are replayed (replay.py), each rank at its own pace: ranks of one node share a port, a
rooted or blocking call keeps one port busy while others wait, and a rank that is done early begins the next call. A
pipeline of segments, in which no rank gets ahead, takes as long as its busiest port, in the busier direction, plus a
latency for each dependent step. If there are too many messages to replay, every stage is computed like such a pipeline:
the alpha-beta-gamma model of Thakur et al. (mpi_algorithms.py) with the node's port in place of the rank.

Not modelled: random variation (an Allreduce of 8 MB on 4 hosts took MPICH 0.28 to 0.59 s), and waits for a core if
spinning ranks outnumber the cores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dist.cost.messages import Messages, Setting, message_schedule
from dist.cost.mpi_algorithms import RENDEZVOUS_BYTES
from dist.cost.ports import Links
from dist.cost.replay import replay_seconds
from dist.cost.sparse_rows import Rows, SparseMessages
from dist.cost.stages import Stage, node_traffic

# An Ethernet frame of 1514 bytes carries 1448 bytes of TCP data. 24 more bytes are on the wire, but a shaper does not
# count them. Headers stretch the time by 1.045, as in every long transfer on the virtual cluster.
TCP_HEADERS = 1514 / 1448
# Each turn of a message in a port's queue costs the replay a few microseconds for each message under way at that time.
MOST_REPLAYED = 500_000  # messages times ranks
MOST_TURNS = 2_500_000  # turns times ranks; larger exchanges move more bytes in a turn


@dataclass(frozen=True)
class Cluster:
    """Ranks, nodes, and the rates at which bytes move.

    placement: node of each rank. rate_in, rate_out: bytes/s of the nodes' ports, one number or one per node. latency_s:
    of one message between nodes, including software. tcp: whether two ranks share one TCP connection (replay.py).
    nominal: whether the rates are link speeds, which include TCP/IP headers; measured rates count payload only.
    local_rate, local_reduce_rate: bytes/s at which an MPI call moves, or sums, a vector between two ranks of a node.
    add_rate: bytes/s at which a rank adds received data. The defaults of these three are for a free core: measure them
    if ranks share cores. queue_bytes: bytes of one message that a port accepts before it serves the next message (TCP's
    window and the port's queue); 0.5 MB fits the times on the virtual cluster best.
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
        """Return the seconds a byte takes through each port, (nodes,)."""
        return np.broadcast_to((TCP_HEADERS if self.nominal else 1.0) / np.asarray(rates, float), self.nodes)


@dataclass(frozen=True)
class Prediction:
    """Seconds and bytes of an exchange. bytes_in, bytes_out: int64 (nodes,). algorithms: of the MPI library."""

    seconds: float
    bytes_in: np.ndarray
    bytes_out: np.ndarray
    algorithms: list[str]

    def __add__(self, other: "Prediction") -> "Prediction":
        """Add an exchange that follows this one."""
        return Prediction(
            self.seconds + other.seconds, self.bytes_in + other.bytes_in, self.bytes_out + other.bytes_out,
            self.algorithms + other.algorithms,
        )  # fmt: skip

    def divided(self, steps: int) -> "Prediction":
        """Return the mean of `steps` steps of which one makes this exchange."""
        return Prediction(self.seconds / steps, self.bytes_in // steps, self.bytes_out // steps, self.algorithms)


def predict(messages: Callable[[Setting], Messages], cluster: Cluster, setting: Setting) -> Prediction:
    """Predict one step's exchange between the ranks of the cluster. Raise the errors of message_schedule.

    A dedicated server changes nothing here: it takes part in every call, as the other ranks do.
    """
    stages, algorithms = message_schedule(messages, setting)
    return _prediction(stages, cluster, setting.library, algorithms)


def predict_rows(messages: SparseMessages, cluster: Cluster, rows: Rows, library: str) -> Prediction:
    """Predict the exchange of a sparse embedding gradient that is sent separately from the vector."""
    stages = messages(np.asarray(cluster.placement), rows) if len(cluster.placement) > 1 else []
    return _prediction(stages, cluster, library, [])


def _prediction(stages: list[Stage], cluster: Cluster, library: str, algorithms: list[str]) -> Prediction:
    into, out = node_traffic(stages, cluster.placement)
    return Prediction(exchange_seconds(stages, cluster, library), into, out, algorithms)


def lower_bound_s(cluster: Cluster, size_bytes: int) -> float:
    """Return 2 (M-1)/M D/B, the least seconds of an allreduce at the slowest port's rate, without switch support."""
    slowest = min(np.min(cluster.rate_in), np.min(cluster.rate_out))
    return float(2 * (cluster.nodes - 1) / cluster.nodes * size_bytes / slowest)


def exchange_seconds(stages: list[Stage], cluster: Cluster, library: str) -> float:
    """Return the seconds of all stages. Those not all_together are replayed, with the protocols of `library`."""
    ranks = len(cluster.placement)
    apart = [stage for stage in stages if not stage.all_together]
    if ranks * sum(stage.repeat * len(stage.size) for stage in apart) > MOST_REPLAYED:
        return float(sum(stage_seconds(stage, cluster) for stage in stages))
    replayed_bytes = sum(stage.repeat * float(stage.size.sum()) for stage in apart)
    links = links_of(cluster, library, replayed_bytes * ranks / MOST_TURNS)
    seconds = 0.0
    for together, some in groupby(stages, lambda stage: stage.all_together):
        if together:
            seconds += sum(stage_seconds(stage, cluster) for stage in some)
        else:
            seconds += replay_seconds([stage for stage in some for _ in range(stage.repeat)], links)
    return float(seconds)


def links_of(cluster: Cluster, library: str, least_queue_bytes: float = 0.0) -> Links:
    """Return the cluster's links with the library's protocols. least_queue_bytes: a lower bound of queue_bytes: with a
    larger queue the replay of many bytes is coarser, and faster."""
    return Links(
        np.asarray(cluster.placement), cluster.port_seconds(cluster.rate_in), cluster.port_seconds(cluster.rate_out),
        cluster.latency_s, 1 / cluster.local_rate, 1 / cluster.local_reduce_rate, 1 / cluster.add_rate,
        RENDEZVOUS_BYTES[library], max(cluster.queue_bytes, least_queue_bytes), cluster.tcp,
    )  # fmt: skip


def stage_seconds(stage: Stage, cluster: Cluster) -> float:
    """Return the seconds of one stage with its repeats, if all ranks begin and end it together."""
    nodes = np.asarray(cluster.placement)
    sizes = stage.size * (nodes[stage.source] != nodes[stage.destination])
    in_s = cluster.port_seconds(cluster.rate_in)
    out_s = cluster.port_seconds(cluster.rate_out)
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
    """Return (the stage's least seconds, for messages in nodes and additions; seconds to add to its port time)."""
    nodes = np.asarray(cluster.placement)
    crosses = nodes[stage.source] != nodes[stage.destination]
    local_rate = cluster.local_reduce_rate if stage.added else cluster.local_rate
    local_s = np.bincount(stage.destination, stage.size * ~crosses, len(nodes)).max() / local_rate
    after_s = stage.steps * cluster.latency_s + stage.added / cluster.add_rate if crosses.any() else 0.0
    return max(local_s, stage.added_meanwhile / cluster.add_rate), after_s
