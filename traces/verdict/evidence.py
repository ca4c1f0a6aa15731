"""The evidence of a diagnosis: numbers measured once from a run. Rules read them and return findings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from traces.read.analysis import StepTimes, check_sums, rates
from traces.read.efficiency import efficiency, ideal_runtimes
from traces.read.pipeline_times import PipelineTimes, pipeline_of
from traces.read.runs import Run
from traces.read.traffic import WAYS, NodeTraffic, hidden_exchange_s, node_traffic
from traces.read.waits import STATES, WaitStates, find_wait_states
from traces.record.phases import COMPUTE, EXCHANGE, INDEX, PIPELINE, STEP
from traces.record.steps import is_regular
from traces.units import bytes_text, count_text
from traces.verdict.thresholds import CHANGED_LINK, FEW_STEPS, UNEXPLAINED


@dataclass(frozen=True)
class Finding:
    """A bottleneck that a rule found.

    kind: a key of titles.SHOWN_IN. seconds: the cost per step (median over steps; mean for stalls). headline: a few
    words, for titles. sentence: the measurement, what it is compared with, and advice.
    node, rank: the place of the bottleneck, or None. direction: of the node's port, "in" or "out"; None for both or
    neither. facts: the numbers in the sentence, with units in their names.
    """

    kind: str
    seconds: float
    headline: str
    sentence: str
    phase: str | None = None
    node: int | None = None
    rank: int | None = None
    direction: str | None = None
    facts: dict = field(default_factory=dict)


@dataclass(frozen=True)
class PredictedExchange:
    """The bytes (M,) through each node's port in one exchange, computed from the strategy's messages."""

    nodes: list[int]
    bytes_in: np.ndarray
    bytes_out: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """The numbers measured from a run. S steps, R ranks in run.ranks, M nodes."""

    run: Run
    times: StepTimes
    traffic: NodeTraffic | None
    predicted: PredictedExchange | None
    efficiency: dict
    wait_states: WaitStates
    ideal_s: np.ndarray

    @cached_property
    def links(self) -> dict[int, dict]:
        """Run.links, with the largest rates of both probes and of the run's own traffic, averaged over all steps.

        A single exchange would mislead: a token bucket may let it pass faster than the port's rate.
        """
        carried = {way: self.traffic.step_rate(way) for way in WAYS} if self.traffic else {}
        return {
            node: link | {way: max(link[way], rates[self.run.nodes.index(node)]) for way, rates in carried.items()}
            for node, link in self.run.links.items()
            if node in self.run.nodes
        }

    def link_rates(self, way: str) -> np.ndarray:
        """Return (M,) bytes/s from `links`; nan for a node without a link."""
        links = [self.links.get(node) for node in self.run.nodes]
        return np.array([link[way] if link else np.nan for link in links])

    @cached_property
    def step_s(self) -> float:
        """Median duration of a step in seconds."""
        return float(np.median(self.times.step_seconds))

    def share(self, seconds: float) -> str:
        """Return a text like "66% of the step"."""
        return f"{min(1.0, seconds / self.step_s):.0%} of the step"

    @cached_property
    def compute(self) -> np.ndarray:
        """(S, R) seconds of forward and backward, or of another program's compute phase."""
        return self.times.phase("compute", "forward", "backward")

    @cached_property
    def workers(self) -> np.ndarray:
        """Indices of the ranks that compute; a dedicated server does not."""
        return np.flatnonzero(np.median(self.compute, axis=0) > 0)

    @cached_property
    def own(self) -> np.ndarray:
        """(S, R) seconds that a rank spent neither in an exchange nor waiting."""
        return self.times.phase(STEP) - self.times.phase(*EXCHANGE, *PIPELINE, "wait")

    @cached_property
    def regular(self) -> np.ndarray:
        """(S,) bool: the steps that were traced whatever their length; all steps if there are none."""
        numbers = self.times.steps - (self.run.config.get("resumed_step") or 0)
        is_thinned = self.run.config["settings"].get("trace", "on") == "on"
        regular = np.array([not is_thinned or is_regular(number) for number in numbers.tolist()])
        return regular if regular.any() else ~regular

    @cached_property
    def pipeline(self) -> PipelineTimes | None:
        return pipeline_of(self.run, self.times)

    @cached_property
    def alike(self) -> list[np.ndarray]:
        """The workers' indices by stage. The ranks of a stage have equal work; stages differ by design."""
        stages = np.array([stage for (stage,) in self.run.places_in("stage")])[self.workers]
        return [self.workers[stages == stage] for stage in sorted(set(stages.tolist()))]

    @cached_property
    def transfer_s(self) -> float:
        """Median seconds by which a step is longer than on a network that takes no time; at most `step_s`."""
        return float(np.median(np.maximum(self.times.step_seconds - self.ideal_s, 0.0)))

    @cached_property
    def transfer_by_phase(self) -> dict[str, float]:
        """Median seconds of each exchange phase on the rank where it is longest, without waiting for late ranks."""
        longest = np.median(self.times.seconds - self.times.waiting, axis=0).max(axis=0)
        return {name: float(longest[INDEX[name]]) for name in EXCHANGE if longest[INDEX[name]] > 0}

    @cached_property
    def node_bytes(self) -> dict[str, np.ndarray] | None:
        """{"in", "out"}: (M,) bytes of a step through each node's port: counted, or else predicted."""
        return {way: self.traffic.step_bytes(way) for way in WAYS} if self.traffic else self.predicted_bytes

    @cached_property
    def predicted_bytes(self) -> dict[str, np.ndarray] | None:
        """{"in", "out"}: (M,) bytes of an exchange through each node's port; None if unknown."""
        if self.predicted is None:
            return None
        present = np.isin(self.predicted.nodes, self.run.nodes)
        return {"in": self.predicted.bytes_in[present], "out": self.predicted.bytes_out[present]}

    @property
    def transfer_phase(self) -> str | None:
        """The exchange phase that spends most time moving data."""
        return max(self.transfer_by_phase, key=self.transfer_by_phase.get, default=None)

    @cached_property
    def thin(self) -> list[str]:
        """Reasons why the verdict is less certain, a sentence each."""
        found = list(self.run.missing)
        steps = len(self.times.steps)
        if steps < FEW_STEPS:
            found.append(f"only {count_text(steps, 'step')} measured")
        if len(self.run.nodes) > 1:
            waits = self.wait_states.seconds
            error_s = self.run.clock_error_ns * 1e-9
            if len(waits) and error_s > np.median(waits):
                found.append(f"clocks may be {error_s * 1e6:.0f} us off, and more than half of the waits are shorter")
            found += self._link_doubts()
            if self.traffic is None:
                source = ": bytes are computed from the strategy's messages" if self.predicted else ""
                found.append(f"no node counters{source}")
        return found + check_sums(self.run, self.times, UNEXPLAINED)

    def _link_doubts(self) -> list[str]:
        """Return reasons to doubt the links' rates."""
        start = self.run.start_links
        end = self.run.end_links
        if not start:
            return ["no links were measured"]
        changed = [
            f"{link['host']}'s port carried {bytes_text(link[way])}/s {way} before the run and "
            f"{bytes_text(end[node][way])}/s after it"
            for node, link in start.items()
            for way in WAYS
            if node in end and not CHANGED_LINK < end[node][way] / link[way] < 1 / CHANGED_LINK
        ]
        return [*changed[:1], *([f"{len(changed) - 1} more ports' rates changed"] if changed[1:] else [])]

    @property
    def compute_s(self) -> float:
        """Median seconds that the busiest rank of a step computes."""
        return float(np.median(self.times.phase(*COMPUTE).max(axis=1)))

    def numbers(self) -> dict:
        """Return the evidence as plain values for JSON; times in seconds, rates in bytes/s.

        `compute_s` is the whole compute time of a step's busiest rank. In `ranks` it excludes the update: only
        forward and backward are compared between ranks.
        """
        ranks = len(self.run.ranks)
        return {
            "steps": len(self.times.steps),
            "step_s": self.step_s,
            "mean_step_s": float(np.mean(self.times.step_seconds)),
            **rates(self.run, self.times),
            "compute_s": self.compute_s,
            "exchange_s": self.transfer_s,
            "exchange_by_phase_s": self.transfer_by_phase,
            "hidden_exchange_s": hidden_exchange_s(self.times, self.traffic),
            # The mean rank's waiting by wait state; the time that all others together waited for each rank.
            "waiting_s": _medians(STATES, self.wait_states.per_step(self.times.steps, ranks).mean(axis=1)),
            "waited_for_s": _medians(self.run.rank_numbers, self.wait_states.caused(self.times.steps, ranks)),
            "efficiency": self.efficiency,
            "pipeline": self.pipeline and self.pipeline.as_dict(),
            "ranks": self._rank_rows(),
            "nodes": self._node_rows(),
        }

    def _rank_rows(self) -> list[dict]:
        quartiles = map(_quartiles, (self.compute, self.times.phase("data")))
        columns = zip(self.run.rank_numbers, self.run.rank_nodes, *quartiles, strict=True)
        rows = [dict(zip(("rank", "node", "compute_s", "data_s"), row, strict=True)) for row in columns]
        mesh = self.run.mesh
        return rows if mesh is None else [row | {"place": mesh.name(place)} for place, row in enumerate(rows)]

    def _node_rows(self) -> list[dict]:
        """Return each node's host, its link's rates, how much of them was used, and bytes a step.

        bytes_over_schedule: counted bytes over those of the strategy's messages. Without other traffic it is 1.00 on
        virtual hosts, and 1.045 over Ethernet, where a network card counts the headers of each frame.
        """
        traffic = self.traffic
        rows = []
        for index, node in enumerate(self.run.nodes):
            row = {"node": node, "host": self.run.hosts[node]}
            link = self.links.get(node)
            if link:
                row["link_bytes_per_s"] = {way: link[way] for way in (*WAYS, "both")}
            if link and traffic:
                row["link_used"] = {way: float(traffic.exchange_rate(way)[index] / link[way]) for way in WAYS}
            if self.node_bytes is not None:
                row["bytes_a_step"] = {way: float(amounts[index]) for way, amounts in self.node_bytes.items()}
            if traffic and self.predicted_bytes:
                row["bytes_over_schedule"] = {
                    way: row["bytes_a_step"][way] / float(amounts[index]) if amounts[index] > 0 else None
                    for way, amounts in self.predicted_bytes.items()
                }
            rows.append(row)
        return rows


def _medians(names: Sequence, seconds: np.ndarray) -> dict[str, float]:
    """Return {name: median over the steps}, where it is positive, from (S, names) seconds."""
    return {str(name): float(s) for name, s in zip(names, np.median(seconds, axis=0), strict=True) if s > 0}


def _quartiles(seconds: np.ndarray) -> list[dict[str, float]]:
    """Return each rank's median, low and high quartile over the steps, from (S, R) seconds."""
    quartiles = np.quantile(seconds, (0.5, 0.25, 0.75), axis=0).T.tolist()
    return [dict(zip(("median", "low", "high"), row, strict=True)) for row in quartiles]


def gather(run: Run, times: StepTimes, predicted: PredictedExchange | None = None) -> Evidence:
    ideal_s = ideal_runtimes(run, times)
    return Evidence(
        run, times, node_traffic(run, times), predicted, efficiency(times, ideal_s), find_wait_states(run), ideal_s
    )
