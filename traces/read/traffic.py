"""The traffic of each node's ports, from its counters: bytes and rates by direction, step and phase.

A node's leader reads the counters at the ends of its steps and phases. Bytes are attributed to the leader's phases, as
if they flowed evenly between two readings. Bytes that flow while the leader is in no phase count for the step only.
Headers count as the port sees them (dist/probe/ports.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes, sum_by_cell
from traces.read.runs import Run
from traces.record.phases import COMPUTE, EXCHANGE, INDEX, STEP

WAYS = ("in", "out")


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes through each node's ports. S steps, M nodes, P phases as in StepTimes.

    nodes: their numbers. bytes: {"in", "out"}: (S, M, P) float64, by the phase of the node's leader; the last phase is
    the whole step. seconds: (S, M, P) float64, of the leader's phases. average: StepTimes.average.
    """

    nodes: list[int]
    bytes: dict[str, np.ndarray]
    seconds: np.ndarray
    average: Callable[[np.ndarray], np.ndarray]

    def step_bytes(self, way: str) -> np.ndarray:
        """Return (M,) bytes of an average step, including bytes between its phases."""
        return self.average(self.bytes[way][:, :, INDEX[STEP]])

    def step_rate(self, way: str) -> np.ndarray:
        """Return (M,) mean bytes/s over the steps, compute time included: no port exceeds its rate for so long."""
        return self.bytes[way][:, :, INDEX[STEP]].sum(axis=0) / self.seconds[:, :, INDEX[STEP]].sum(axis=0)

    def exchange_rate(self, way: str) -> np.ndarray:
        """Return (M,) mean bytes/s through each node's port in its busiest exchange phase."""
        exchange = [INDEX[name] for name in EXCHANGE]
        total = self.bytes[way].sum(axis=0)[:, exchange]
        seconds = self.seconds.sum(axis=0)[:, exchange]
        # Phases of microseconds (a sum of one number) are credited with bytes of neighbouring phases.
        long_enough = seconds >= 0.02 * self.seconds[:, :, INDEX[STEP]].sum(axis=0)[:, None]
        return np.where(long_enough, total / np.maximum(seconds, 1e-12), 0.0).max(axis=1)


def node_traffic(run: Run, times: StepTimes) -> NodeTraffic | None:
    """Attribute each node's bytes to steps and phases. None unless all nodes have counters."""
    counters = {one.node: one.records for one in run.counters if len(one.records) > 1}
    nodes = run.nodes
    if set(nodes) - set(counters):
        return None
    places = [run.rank_nodes.index(node) for node in nodes]  # the first rank of a node is its leader
    amounts = {}
    for way in WAYS:
        grown = []
        for node, place in zip(nodes, places, strict=True):
            records = run.ranks[place].records
            samples = counters[node]
            start, end = (np.interp(records[edge], samples["time"], samples[way]) for edge in ("start", "end"))
            grown.append(end - start)
        amounts[way] = sum_by_cell([times.cells[place] for place in places], grown, len(times.steps))
    return NodeTraffic(nodes, amounts, times.seconds[:, places], times.average)


def hidden_share(traffic: NodeTraffic) -> np.ndarray:
    """Return (S,) fraction of all ports' bytes in a step that moved while the nodes' leaders computed."""
    by_phase = sum(traffic.bytes.values()).sum(axis=1)
    computing = by_phase[:, [INDEX[name] for name in COMPUTE]].sum(axis=1)
    return computing / np.maximum(by_phase[:, INDEX[STEP]], 1)


def hidden_exchange_s(times: StepTimes, traffic: NodeTraffic | None) -> float | None:
    """Return the median seconds of a step's exchange that are hidden behind compute; None without counters.

    Assumes that a hidden byte takes as long as a byte of the visible exchange: the exchange phases without waiting for
    late ranks, on the rank where they take longest.
    """
    if traffic is None:
        return None
    transfer_s = (times.phase(*EXCHANGE) - times.waiting_in(*EXCHANGE)).max(axis=1)
    hidden = hidden_share(traffic)
    return float(np.median(transfer_s * hidden / np.maximum(1 - hidden, 1e-9)))
