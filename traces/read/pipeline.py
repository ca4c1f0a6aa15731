"""The stages of a pipeline: how long each computes for a micro-step, how long they wait, and what that is made of.

With tau_s the seconds that stage s computes for a micro-step, sums over parts included, m micro-steps and p stages, a
step takes (m-1) max tau + sum tau if messages take no time (Huang et al. 2019; Narayanan et al. 2021). What a stage
waits of that, the mean over stages:

    structure   (p-1) mean tau            the bubble of equal stages, (p-1)/(m+p-1) of the step
    imbalance   (m-1) (max tau - mean)    the longest stage holds up the others in each micro-step
    transfer    what was measured beyond both: messages on their way, micro-steps that vary

Measured is what a rank spends in receives and, behind its last backward, what it waits until the last stage of its copy
is done, wherever it does: in the norm, for the copies, at the end of the step. What it exchanges meanwhile is no
waiting, so that less may be measured than the structure alone asks for.
"""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes, cells, sum_by_cell
from traces.read.runs import Run
from traces.record.phases import INDEX, PIPELINE

FORWARD, BACKWARD = INDEX["forward"], INDEX["backward"]
BETWEEN_PASSES = [INDEX[name] for name in ("data", *PIPELINE)]
BETTER = 0.95  # of the longest stage: what other layers must come to, to be worth saying


@dataclass(frozen=True)
class Pipeline:
    """Seconds are of a median step. tau_s: (p,) of a micro-step on each stage; wait_s: that a rank waits for other
    stages of its copy, the mean over ranks; layers: of each stage, () if unknown."""

    micro_steps: int
    tau_s: np.ndarray
    wait_s: float
    layers: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.tau_s)

    @property
    def structure_s(self) -> float:
        return (self.stages - 1) * float(self.tau_s.mean())

    @property
    def imbalance_s(self) -> float:
        return (self.micro_steps - 1) * float(self.tau_s.max() - self.tau_s.mean())

    @property
    def ideal_s(self) -> float:
        """Of forwards and backwards, if messages took no time."""
        return (self.micro_steps - 1) * float(self.tau_s.max()) + float(self.tau_s.sum())

    @property
    def waits_s(self) -> dict[str, float]:
        """What `wait_s` is made of; its parts add up to it."""
        ends = np.minimum([0.0, self.structure_s, self.structure_s + self.imbalance_s, np.inf], self.wait_s)
        return dict(zip(("structure", "imbalance", "transfer"), np.diff(ends).tolist(), strict=True))

    def bubble(self, micro_steps: int) -> float:
        """The share of a step that equal stages would wait with so many micro-steps."""
        return (self.stages - 1) / (micro_steps + self.stages - 1)

    def as_dict(self) -> dict:
        return {
            "stages": self.stages, "micro_steps": self.micro_steps, "layers": [*self.layers],
            "tau_s": self.tau_s.tolist(), "wait_s": self.wait_s, "waits_s": self.waits_s,
            "structure_s": self.structure_s, "imbalance_s": self.imbalance_s, "ideal_s": self.ideal_s,
        }  # fmt: skip


def pipeline_of(run: Run, times: StepTimes) -> Pipeline | None:
    """None of a run without stages, or where one of them left no traces. A stage's time is that of its median rank, so
    that one slow rank does not make it a long stage; medians over the steps."""
    if run.mesh is None or run.mesh.stages == 1 or len(set(run.mesh.stage)) < run.mesh.stages:
        return None
    settings = run.config["settings"]
    micro_steps = int(settings.get("grad_accum") or 1)
    computing = times.phase("forward", "backward", "tensor") - times.waiting_in("tensor")
    of_stages = [np.median(computing[:, run.mesh.stage == stage], axis=1) for stage in range(run.mesh.stages)]
    return Pipeline(
        micro_steps,
        np.array([np.median(seconds) for seconds in of_stages]) / micro_steps,
        float(np.median(_waiting(run, times).mean(axis=1))),
        tuple(map(int, filter(None, (settings.get("pipeline_layers") or "").split(",")))),
    )


def _waiting(run: Run, times: StepTimes) -> np.ndarray:
    """(S, R) seconds that each rank waited for other stages of its copy."""
    waited = np.zeros(times.start_ns.shape)
    for place, bubbles in enumerate(bubbles_ns(run, times.waits)):
        cell = cells(run.ranks[place].records, times.steps, times.start_ns[:, place], times.end_ns[:, place])
        waited[:, place] = sum_by_cell(cell, bubbles, len(times.steps)).sum(axis=1) * 1e-9
    return waited


def bubbles_ns(run: Run, waits: list[np.ndarray]) -> list[np.ndarray]:
    """How long each record's rank waited in it for other stages of its copy, at its beginning: per rank (n,) int64, ns.

    waits: of all waiting, as StepTimes has it. Without stages all are 0.
    """
    records, bounds = np.concatenate([trace.records for trace in run.ranks]), np.cumsum([len(one) for one in waits])
    if run.mesh is None or run.mesh.stages == 1:
        return np.split(np.zeros(len(records), np.int64), bounds[:-1])
    rank = np.repeat(np.arange(len(waits)), [len(one) for one in waits])
    own_end, copys_end = (_last_backwards(records, group) for group in (rank, run.mesh.copy[rank]))
    length = records["end"] - records["start"]
    waited = np.where(records["phase"] == INDEX["wait"], length, np.concatenate(waits))
    # Until its copy is done, a rank that has nothing to do would wait for it somewhere else if it did not here.
    is_behind = (records["start"] >= own_end) & (records["phase"] != INDEX["tensor"])  # parts wait for each other there
    until_done = np.where(is_behind, np.clip(copys_end - records["start"], 0, waited), 0)
    return np.split(np.where(records["phase"] == INDEX["recv"], length, until_done), bounds[:-1])


def _last_backwards(records: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n,) ns: when the last backward of each record's step ended in its group. group: (n,) small numbers."""
    number = records["step"].astype(np.int64) * (int(group.max(initial=0)) + 1) + group
    cell, is_backward = np.unique(number, return_inverse=True)[1], records["phase"] == BACKWARD
    last = np.zeros(int(cell.max(initial=-1)) + 1, np.int64)
    np.maximum.at(last, cell[is_backward], records["end"][is_backward])
    return last[cell]


@dataclass(frozen=True)
class Passes:
    """The forwards and backwards of one rank, n of them by time: (n,) arrays; times in ns.

    step: its number; phase: FORWARD or BACKWARD; micro_step: counted from 0 in each step.
    """

    step: np.ndarray
    phase: np.ndarray
    micro_step: np.ndarray
    start: np.ndarray
    end: np.ndarray


def passes_of(records: np.ndarray) -> Passes:
    """Of one rank's records. Exchanges interrupt a pass, and are inside it; data and messages are between two."""
    is_pass = np.isin(records["phase"], [FORWARD, BACKWARD])
    own = records[is_pass | np.isin(records["phase"], BETWEEN_PASSES)]
    changes = (np.diff(own["phase"], prepend=-1) != 0) | (np.diff(own["step"], prepend=-1) != 0)
    first = np.flatnonzero(np.isin(own["phase"], [FORWARD, BACKWARD]) & changes)
    following = np.append(np.flatnonzero(changes), len(own))
    last = following[np.searchsorted(following, first, side="right")] - 1
    step, phase = own["step"][first], own["phase"][first]
    micro_step = np.zeros(len(first), np.int64)
    for kind in (FORWARD, BACKWARD):
        of_kind = np.flatnonzero(phase == kind)
        steps = step[of_kind]
        micro_step[of_kind] = np.arange(len(of_kind)) - np.searchsorted(steps, steps)
    return Passes(step, phase, micro_step, own["start"][first], own["end"][last])


def shortest_forwards(run: Run, times: StepTimes) -> np.ndarray:
    """(S, R) seconds of each rank's shortest forward of a micro-step, sums over parts included; inf without one.

    What is done once in a step is not in it: the first stage's embedding is sent to the last during some of them.
    """
    shortest = np.full(times.start_ns.shape, np.inf)
    for place, trace in enumerate(run.ranks):
        passes = passes_of(trace.records)
        chosen = (passes.phase == FORWARD) & np.isin(passes.step, times.steps)
        seconds = (passes.end - passes.start)[chosen] * 1e-9
        np.minimum.at(shortest[:, place], np.searchsorted(times.steps, passes.step[chosen]), seconds)
    return shortest


def stage_work(pipeline: Pipeline) -> tuple[float, np.ndarray] | None:
    """Seconds of a layer, and (p,) what a stage takes for a micro-step beside its layers; None where these are unknown.

    A layer takes what it takes on the median stage of those between the first, which has the embedding, and the last,
    which has the head. Of two stages it is what it takes on the first.
    """
    layers, tau = np.array(pipeline.layers), pipeline.tau_s
    if len(layers) != pipeline.stages or not layers[:-1].all():
        return None
    between = slice(1, -1) if pipeline.stages > 2 else slice(1)
    layer = float(np.median(tau[between] / layers[between]))
    beside = np.zeros(pipeline.stages)
    beside[[0, -1]] = np.maximum(0.0, tau - layers * layer)[[0, -1]]
    return layer, beside


def better_layers(pipeline: Pipeline, least_last: int) -> tuple[int, ...] | None:
    """The layers of each stage with which the longest is shortest, from the measured seconds; None where they are not
    known, or where those that it has are about as good. least_last: of the last stage; the others have one at least."""
    if (work := stage_work(pipeline)) is None:
        return None
    (layer, beside), layers = work, np.array(pipeline.layers)
    found = np.array([1] * (pipeline.stages - 1) + [least_last])
    for _ in range(int(layers.sum() - found.sum())):  # each to the stage that is then the shortest; of equals, the last
        then = (found + 1) * layer + beside
        found[len(then) - 1 - int(np.argmin(then[::-1]))] += 1
    if (found * layer + beside).max() > BETTER * (layers * layer + beside).max():
        return None
    return tuple(found.tolist())
