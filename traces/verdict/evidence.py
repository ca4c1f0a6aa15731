"""The numbers that a diagnosis rests on, taken from a run once; the rules read them and nothing else."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from traces.read.analysis import StepTimes
from traces.read.efficiency import Efficiency, efficiency, step_runtimes
from traces.read.node_traffic import NodeTraffic, node_traffic
from traces.read.overlap import Overlap, overlap
from traces.read.replay import ideal_runtimes
from traces.read.runs import Run
from traces.read.wait_states import WaitStates, check_sums, find_wait_states
from traces.record.phases import EXCHANGE, INDEX, STEP

FEW_STEPS = 5
UNEXPLAINED = 0.1  # of a rank's steps in no phase: more makes a verdict uncertain


@dataclass(frozen=True)
class Schedule:
    """What the strategy's messages say about one exchange; (M,) arrays, one entry for each of `nodes`.

    bytes_in, bytes_out: through each node's port; messages: that wait for one another; seconds: of the exchange over
    the links as probed
    """

    nodes: list[int]
    bytes_in: np.ndarray
    bytes_out: np.ndarray
    messages: int
    seconds: float


@dataclass(frozen=True)
class Evidence:
    """S steps, R ranks in run.ranks, M nodes."""

    run: Run
    times: StepTimes
    traffic: NodeTraffic | None
    schedule: Schedule | None
    overlap: Overlap
    efficiency: Efficiency
    wait_states: WaitStates
    ideal_s: np.ndarray

    @property
    def rank_numbers(self) -> list[int]:
        return [trace.identity["rank"] for trace in self.run.ranks]

    @property
    def rank_nodes(self) -> list[int]:
        return [trace.identity["node"] for trace in self.run.ranks]

    @property
    def nodes(self) -> list[int]:
        return sorted(set(self.rank_nodes))

    def host(self, node: int) -> str:
        return next(trace.identity["host"] for trace in self.run.ranks if trace.identity["node"] == node)

    @property
    def links(self) -> list[dict]:
        return self.run.config.get("links") or []

    def link_rates(self, way: str) -> np.ndarray:
        """(M,) bytes/s as probed; nan for a node without a link."""
        rates = {link["node"]: link[way] for link in self.links}
        return np.array([rates.get(node, np.nan) for node in self.nodes])

    @cached_property
    def step_s(self) -> float:
        """Median duration of a step, seconds."""
        return float(np.median(self.times.step_seconds))

    def phase(self, *names: str) -> np.ndarray:
        """(S, R) seconds."""
        return self.times.seconds[:, :, [INDEX[name] for name in names]].sum(axis=2)

    @cached_property
    def compute(self) -> np.ndarray:
        """(S, R) seconds of forward and backward."""
        return self.phase("forward", "backward")

    @cached_property
    def workers(self) -> np.ndarray:
        """Indices of the ranks that compute: a dedicated server does not."""
        return np.flatnonzero(np.median(self.compute, axis=0) > 0)

    @cached_property
    def own(self) -> np.ndarray:
        """(S, R) seconds that a rank spent by itself: neither in an exchange nor waiting."""
        return self.phase(STEP) - self.phase(*EXCHANGE, "wait")

    @cached_property
    def transfer_s(self) -> float:
        """Median seconds by which a step is longer than on a network that takes no time."""
        return float(np.median(np.maximum(step_runtimes(self.times) - self.ideal_s, 0.0)))

    @cached_property
    def transfer_by_phase(self) -> dict[str, float]:
        """Median seconds of each exchange phase without waiting for late ranks, on the rank where that is longest."""
        longest = np.median(self.times.seconds - self.times.waiting, axis=0).max(axis=0)
        return {name: float(longest[INDEX[name]]) for name in EXCHANGE if longest[INDEX[name]] > 0}

    @cached_property
    def node_bytes(self) -> dict[str, np.ndarray] | None:
        """{"in", "out"}: (M,) bytes a step through each node's port: counted, or else the schedule's."""
        if self.traffic is not None:
            return {way: self.traffic.step_bytes(way) for way in ("in", "out")}
        if self.schedule is None:
            return None
        present = np.isin(self.schedule.nodes, self.nodes)
        return {"in": self.schedule.bytes_in[present], "out": self.schedule.bytes_out[present]}

    @property
    def transfer_phase(self) -> str | None:
        """The exchange phase that moves data longest."""
        return max(self.transfer_by_phase, key=self.transfer_by_phase.get, default=None)

    @cached_property
    def thin(self) -> list[str]:
        """What makes a verdict less certain, a sentence each."""
        found = list(self.run.missing)
        steps = len(self.times.steps)
        if steps < FEW_STEPS:
            found.append(f"only {steps} step{'s' * (steps > 1)} measured")
        if len(self.nodes) > 1:
            found += self._thin_network()
        return found + check_sums(self.run, self.times, UNEXPLAINED)

    def _thin_network(self) -> list[str]:
        found = []
        waits = self.wait_states.seconds
        error_s = max(trace.clock["error_ns"] for trace in self.run.ranks) * 1e-9
        if len(waits) and error_s > np.median(waits):
            found.append(f"clocks may be {error_s * 1e6:.0f} us off, more than half of the waits are shorter")
        if not self.links:
            found.append("no links were measured: config.json has none")
        if self.traffic is None:
            found.append("no node counters: bytes are the schedule's" if self.schedule else "no node counters")
        return found


def gather(run: Run, times: StepTimes, schedule: Schedule | None = None) -> Evidence:
    traffic, ideal_s = node_traffic(run, times), ideal_runtimes(run, times)
    return Evidence(
        run, times, traffic, schedule, overlap(times, traffic), efficiency(run, times, ideal_s), find_wait_states(run),
        ideal_s,
    )  # fmt: skip
