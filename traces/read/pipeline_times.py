"""The stages of a pipeline: how long each one computes for a microbatch, and how long it waits, by cause.

With tau_s the seconds that stage s computes for a microbatch (exchanges between tensor-parallel shards included), m
microbatches and p stages, a step takes (m-1) max tau + sum tau if messages take no time (Huang et al. 2019; Narayanan
et al. 2021). The waiting of a stage, mean over stages, by cause:

    structure   (p-1) mean tau            the bubble of equal stages, (p-1)/(m+p-1) of the step
    imbalance   (m-1) (max tau - mean)    the longest stage delays the others in each microbatch
    transfer    the rest of the measured waiting: messages, and microbatches of varying length

Waiting is measured as a rank's time in receives, and its time after its last backward until the last stage of its
replica is done, wherever it waits: in the norm, for other replicas, at the end of the step. Exchanges during that time
do not count, so the measured waiting may be less than the structure alone.
"""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes, sum_by_cell
from traces.read.runs import Run
from traces.read.waits import count_before
from traces.record.phases import INDEX, NAMES, PIPELINE

FORWARD = INDEX["forward"]
BACKWARD = INDEX["backward"]
BETWEEN_PASSES = [INDEX[name] for name in ("data", *PIPELINE)]
BETTER = 0.95  # advise another division of the layers if it shortens the longest stage to less than this


@dataclass(frozen=True)
class PipelineTimes:
    """The times of a median step, in seconds.

    tau_s: (p,) for a microbatch on each stage. wait_s: waiting for other stages of the replica, mean over ranks.
    layers: how many each stage has; () if unknown.
    """

    microbatches: int
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
        return (self.microbatches - 1) * float(self.tau_s.max() - self.tau_s.mean())

    @property
    def ideal_s(self) -> float:
        """Seconds of all forwards and backwards if messages took no time."""
        return (self.microbatches - 1) * float(self.tau_s.max()) + float(self.tau_s.sum())

    @property
    def waits_s(self) -> dict[str, float]:
        """`wait_s` by cause."""
        ends = np.minimum([0.0, self.structure_s, self.structure_s + self.imbalance_s, np.inf], self.wait_s)
        return dict(zip(("structure", "imbalance", "transfer"), np.diff(ends).tolist(), strict=True))

    def bubble(self, microbatches: int) -> float:
        """Return the share of a step that equal stages would spend waiting with this many microbatches."""
        return (self.stages - 1) / (microbatches + self.stages - 1)

    def as_dict(self) -> dict:
        return {
            "stages": self.stages, "micro_steps": self.microbatches, "layers": [*self.layers],
            "tau_s": self.tau_s.tolist(), "wait_s": self.wait_s, "waits_s": self.waits_s,
            "structure_s": self.structure_s, "imbalance_s": self.imbalance_s, "ideal_s": self.ideal_s,
        }  # fmt: skip


def pipeline_of(run: Run, times: StepTimes) -> PipelineTimes | None:
    """Measure the stages, medians over the steps. None without stages, or where a stage left no traces.

    A stage's time is the median of its ranks, so one slow rank does not make the stage long.
    """
    if run.mesh is None or run.mesh.stages == 1 or len(set(run.mesh.stage)) < run.mesh.stages:
        return None
    settings = run.config["settings"]
    microbatches = int(settings.get("grad_accum") or 1)
    computing = times.phase("forward", "backward", "tensor") - times.waiting_in("tensor")
    waited_s = sum_by_cell(times.cells, bubbles_ns(run, times.waits), len(times.steps)).sum(axis=2) * 1e-9
    of_stages = [np.median(computing[:, run.mesh.stage == stage], axis=1) for stage in range(run.mesh.stages)]
    return PipelineTimes(
        microbatches,
        np.array([np.median(seconds) for seconds in of_stages]) / microbatches,
        float(np.median(waited_s.mean(axis=1))),
        tuple(map(int, filter(None, (settings.get("pipeline_layers") or "").split(",")))),
    )


def bubbles_ns(run: Run, waits: list[np.ndarray]) -> list[np.ndarray]:
    """Return how many ns, from its start, each record waited for the replica's other stages: per rank (n,) int64.

    waits: all waiting, as in StepTimes. Without stages all are 0.
    """
    records = np.concatenate([trace.records for trace in run.ranks])
    bounds = np.cumsum([len(one) for one in waits])
    if run.mesh is None or run.mesh.stages == 1:
        return np.split(np.zeros(len(records), np.int64), bounds[:-1])
    rank = np.repeat(np.arange(len(waits)), [len(one) for one in waits])
    own_end, replica_end = (_last_backwards(records, group) for group in (rank, run.mesh.replica[rank]))
    length = records["end"] - records["start"]
    waited = np.where(records["phase"] == INDEX["wait"], length, np.concatenate(waits))
    # After its last backward, a rank waits for its replica in all phases but "tensor", where shards wait for shards.
    is_behind = (records["start"] >= own_end) & (records["phase"] != INDEX["tensor"])
    until_done = np.where(is_behind, np.clip(replica_end - records["start"], 0, waited), 0)
    return np.split(np.where(records["phase"] == INDEX["recv"], length, until_done), bounds[:-1])


def _last_backwards(records: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return (n,) ns: when the last backward of each record's step and group ends. group: (n,) small numbers."""
    number = records["step"].astype(np.int64) * (int(group.max(initial=0)) + 1) + group
    cell = np.unique(number, return_inverse=True)[1]
    is_backward = records["phase"] == BACKWARD
    last = np.zeros(int(cell.max(initial=-1)) + 1, np.int64)
    np.maximum.at(last, cell[is_backward], records["end"][is_backward])
    return last[cell]


@dataclass(frozen=True)
class Passes:
    """The forwards and backwards of one rank, sorted by time: (n,) arrays, times in ns.

    step: its number. phase: FORWARD or BACKWARD. microbatch: counted from 0 in each step.
    """

    step: np.ndarray
    phase: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray


def passes_of(records: np.ndarray) -> Passes:
    """Find the passes in one rank's records. Exchanges lie inside a pass; data and messages separate two passes."""
    is_pass = np.isin(records["phase"], [FORWARD, BACKWARD])
    own = records[is_pass | np.isin(records["phase"], BETWEEN_PASSES)]
    changes = (np.diff(own["phase"], prepend=-1) != 0) | (np.diff(own["step"], prepend=-1) != 0)
    first = np.flatnonzero(np.isin(own["phase"], [FORWARD, BACKWARD]) & changes)
    following = np.append(np.flatnonzero(changes), len(own))
    last = following[np.searchsorted(following, first, side="right")] - 1
    step = own["step"][first]
    phase = own["phase"][first]
    microbatch = count_before(step.astype(np.int64) * len(NAMES) + phase)
    return Passes(step, phase, microbatch, own["start"][first], own["end"][last])


def shortest_forwards(run: Run, times: StepTimes) -> np.ndarray:
    """Return (S, R) seconds of each rank's shortest forward, tensor-parallel sums included; inf without a forward.

    The shortest one excludes work that is done once a step: in some forwards, the first stage sends its embedding.
    """
    shortest = np.full(times.start_ns.shape, np.inf)
    for place, trace in enumerate(run.ranks):
        passes = passes_of(trace.records)
        chosen = (passes.phase == FORWARD) & np.isin(passes.step, times.steps)
        seconds = (passes.end - passes.start)[chosen] * 1e-9
        np.minimum.at(shortest[:, place], np.searchsorted(times.steps, passes.step[chosen]), seconds)
    return shortest


def stage_work(pipeline: PipelineTimes) -> tuple[float, np.ndarray] | None:
    """Return a layer's seconds per microbatch, and (p,) seconds of each stage's other work; None if layers are unknown.

    A layer's time is taken from the median of the stages between the first, which has the embedding, and the last,
    which has the head; with two stages, from the first.
    """
    layers = np.array(pipeline.layers)
    tau = pipeline.tau_s
    if len(layers) != pipeline.stages or not layers[:-1].all():
        return None
    between = slice(1, -1) if pipeline.stages > 2 else slice(1)
    layer = float(np.median(tau[between] / layers[between]))
    beside = np.zeros(pipeline.stages)
    beside[[0, -1]] = np.maximum(0.0, tau - layers * layer)[[0, -1]]
    return layer, beside


def better_layers(pipeline: PipelineTimes, least_last: int) -> tuple[int, ...] | None:
    """Return the layers of each stage that make the longest stage shortest, by the measured seconds.

    least_last: the fewest layers of the last stage; the others have at least one. None if the layers are unknown, or if
    the run's own division is about as good.
    """
    work = stage_work(pipeline)
    if work is None:
        return None
    layer, beside = work
    layers = np.array(pipeline.layers)
    found = np.array([1] * (pipeline.stages - 1) + [least_last])
    for _ in range(int(layers.sum() - found.sum())):  # each layer to the shortest stage so far; among equals, the last
        then = (found + 1) * layer + beside
        found[len(then) - 1 - int(np.argmin(then[::-1]))] += 1
    if (found * layer + beside).max() > BETTER * (layers * layer + beside).max():
        return None
    return tuple(found.tolist())
