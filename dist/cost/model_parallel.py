"""Seconds and bytes of a step in which ranks share models: tensor-parallel shards, pipeline stages, replicas.

A stage takes tau seconds for a microbatch's forward and backward, sums over shards included; there are m microbatches
and p stages. A hop is a message from a stage to the next. If hops are short compared with tau, a step takes

    (m - 1) max tau + sum tau + 2 (p - 1) hop + the exchange of the replicas

(Huang et al. 2019, Narayanan et al. 2021). `simulate` follows each stage's list of actions, and models three more
effects: under 1F1B a slow stage that is not the last waits less, because it has other microbatches to work on; with few
microbatches under way, the hops of each are exposed; and the head, which travels between the first stage and the last,
may be late."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from dist.cost.model import Cluster

Plan = Sequence[tuple[str, int]]  # a stage's actions in order: ("forward" or "backward", microbatch)


@dataclass(frozen=True)
class Head:
    """The token embedding, which the first stage sends to the last, and its gradient, which comes back.

    message_s: seconds of either message. share: fraction of the last stage's compute time that the head takes; it
    follows the stage's layers in forward and precedes them in backward.
    """

    message_s: float = 0.0
    share: float = 1.0


def simulate(
    plans: Sequence[Plan], forward_s: Sequence[float], backward_s: Sequence[float], hop_s: float = 0.0, head=Head()
) -> list[float]:
    """Return when each stage has finished its actions, in seconds. forward_s, backward_s: per microbatch.

    An action begins when the stage is free and its input has arrived, hop_s after another stage produced it. Sending
    takes no time. The head is sent at the start, its gradient in the last backward of all. ValueError: a deadlock.
    """
    ends = {}
    free = [0.0] * len(plans)
    turns = [0] * len(plans)
    while any(turn < len(plan) for turn, plan in zip(turns, plans, strict=True)):
        before = list(turns)
        for stage, plan in enumerate(plans):
            for action, index in plan[turns[stage] :]:
                there_s = _input_s(ends, action, index, stage, len(plans), hop_s)
                if there_s is None:
                    break
                seconds = (forward_s if action == "forward" else backward_s)[stage]
                end_s = max(free[stage], there_s) + seconds
                if stage == len(plans) - 1 and turns[stage] == 0:
                    end_s = max(end_s, head.message_s + head.share * seconds)
                free[stage] = end_s
                ends[action, index, stage] = end_s
                turns[stage] += 1
        if turns == before:
            raise ValueError(
                f"{sum(map(len, plans)) - sum(turns)} actions wait for one another, expected lists in which each input "
                "is made before: look at the schedule"
            )
    free[0] = max(free[0], free[-1] - (1 - head.share) * backward_s[-1] + head.message_s)
    return free


def _input_s(ends: dict, action: str, index: int, stage: int, stages: int, hop_s: float) -> float | None:
    """Return when the input of an action arrives; None if it has not been produced."""
    if action == "backward" and ("forward", index, stage) not in ends:
        return None
    source = stage - 1 if action == "forward" else stage + 1
    if not 0 <= source < stages:
        return 0.0
    made_s = ends.get((action, index, source))
    return None if made_s is None else made_s + hop_s


# Bytes. rows: bytes of a microbatch's activations, 4 B T C.


def tensor_bytes(parts: int, rows: int, layers: int, is_first: bool, is_last: bool) -> float:
    """Return the bytes a rank sends per microbatch for sums over shards: an allreduce sends 2 (t-1)/t of its rows.

    A layer needs four sums, two in forward and two in backward; the embedding one in forward, the head one in backward.
    """
    return (4 * layers + is_first + is_last) * 2 * (parts - 1) / parts * rows


def pipeline_bytes(stages: int, rows: int, micro_steps: int) -> int:
    """Return the bytes a replica sends per step between stages: rows down, gradients up."""
    return 2 * (stages - 1) * micro_steps * rows


def head_bytes(stages: int, embedding: int) -> int:
    """Return the bytes a replica sends per step for the head. embedding: bytes of the token embedding."""
    return 2 * embedding if stages > 1 else 0


@dataclass(frozen=True)
class Seats:
    """The place of every rank in the mesh of dist/mesh.py. cluster: with all ranks.

    ValueError if the ranks do not divide into shards and stages.
    """

    cluster: Cluster
    parts: int
    stages: int

    def __post_init__(self):
        ranks = len(self.cluster.placement)
        if ranks % (self.parts * self.stages):
            raise ValueError(
                f"{ranks} ranks for {self.parts} shards x {self.stages} stages, expected a multiple of "
                f"{self.parts * self.stages}: describe as many, or split the model differently"
            )

    @cached_property
    def nodes(self) -> np.ndarray:
        """The node of each rank, (stages, replicas, shards)."""
        nodes = np.asarray(self.cluster.placement)
        nodes = np.sort(nodes) if self.parts * self.stages > 1 else nodes  # replicas alone stay in the job's order
        return nodes.reshape(self.stages, -1, self.parts)

    @property
    def copies(self) -> int:
        return self.nodes.shape[1]

    def data_cluster(self, stage: int) -> Cluster:
        """Return the cluster of a stage's ranks, by replica, then shard; stages that share a port divide its rates."""
        here, placement = np.unique(self.nodes[stage].ravel(), return_inverse=True)
        rate_in, rate_out = (
            np.broadcast_to(np.asarray(rate, float), self.cluster.nodes)[here] / self._stages_crossing[here]
            for rate in (self.cluster.rate_in, self.cluster.rate_out)
        )
        return replace(self.cluster, placement=placement, rate_in=rate_in, rate_out=rate_out)

    @cached_property
    def _stages_crossing(self) -> np.ndarray:
        """(nodes,): the number of stages whose replicas exchange through the port of each node, at least 1."""
        crossing = np.zeros(self.cluster.nodes)
        for nodes in self.nodes:
            groups = [group for group in nodes.T if len(set(group)) > 1]  # one for each shard
            crossing[np.unique(groups).astype(int)] += 1
        return np.maximum(crossing, 1)

    def hop_s(self, rows: int) -> float:
        """Return the seconds to send rows (bytes) over the slowest stage boundary; each tp rank sends a share."""
        return max((self._between_s(*pair, rows / self.parts) for pair in pairwise(self.nodes)), default=0.0)

    def head_s(self, embedding: int) -> float:
        """Return the seconds to send the token embedding (bytes) from the first stage to the last, in shares."""
        return self._between_s(self.nodes[0], self.nodes[-1], embedding / self.parts) if self.stages > 1 else 0.0

    def _between_s(self, upper: np.ndarray, lower: np.ndarray, share: float) -> float:
        """Return the seconds of `share` bytes between a stage's ranks and their peers in another, the slower way.

        All replicas and shards send at once, through the ports that they share.
        """
        crosses = (upper != lower).ravel()
        local_s = share / self.cluster.local_rate
        if not crosses.any():
            return local_s
        out_s, in_s = self._port_seconds
        sent, come = (np.bincount(end.ravel()[crosses], minlength=self.cluster.nodes) for end in (upper, lower))
        longest = max((sent * out_s).max(), (come * in_s).max(), (come * out_s).max(), (sent * in_s).max())
        return float(max(local_s, self.cluster.latency_s + share * longest))

    @cached_property
    def _port_seconds(self):
        return [self.cluster.port_seconds(rate) for rate in (self.cluster.rate_out, self.cluster.rate_in)]

    def ports_s(self, rows: int) -> float:
        """Return the seconds the busiest port needs for one microbatch's messages between stages, each way."""
        upper = self.nodes[:-1].ravel()
        lower = self.nodes[1:].ravel()
        ends = np.concatenate([upper[upper != lower], lower[upper != lower]])  # each sends one message and receives one
        messages = np.bincount(ends, minlength=self.cluster.nodes)
        return float((messages * np.maximum(*self._port_seconds)).max() * rows / self.parts)
