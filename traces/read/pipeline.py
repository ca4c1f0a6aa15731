"""The stages of a pipeline: how long each computes for a micro-step, how long they wait, and what that is made of.

With tau_s the seconds that stage s computes for a micro-step, sums over parts included, m micro-steps and p stages, a
step takes (m-1) max tau + sum tau if messages take no time (Huang et al. 2019; Narayanan et al. 2021). What a stage
waits of that, the mean over stages:

    structure   (p-1) mean tau            the bubble of equal stages, (p-1)/(m+p-1) of the step
    imbalance   (m-1) (max tau - mean)    the longest stage holds up the others in each micro-step
"""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes
from traces.read.runs import Run
from traces.record.phases import INDEX, PIPELINE

FORWARD, BACKWARD = INDEX["forward"], INDEX["backward"]
BETWEEN_PASSES = [INDEX[name] for name in ("data", *PIPELINE)]


@dataclass(frozen=True)
class Pipeline:
    """Seconds are of a median step. tau_s: (p,) of a micro-step on each stage; wait_s: that a rank spends in receives,
    the mean over ranks; late_s: the part of it before its sender came to send; layers: of each stage, () if unknown."""

    micro_steps: int
    tau_s: np.ndarray
    wait_s: float
    late_s: float
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

    def bubble(self, micro_steps: int) -> float:
        """The share of a step that equal stages would wait with so many micro-steps."""
        return (self.stages - 1) / (micro_steps + self.stages - 1)

    def as_dict(self) -> dict:
        return {
            "stages": self.stages, "micro_steps": self.micro_steps, "layers": [*self.layers],
            "tau_s": self.tau_s.tolist(), "wait_s": self.wait_s, "late_s": self.late_s,
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
    received = times.phase("recv")
    return Pipeline(
        micro_steps,
        np.array([np.median(seconds) for seconds in of_stages]) / micro_steps,
        float(np.median(received.mean(axis=1))),
        float(np.median(times.waiting_in("recv").mean(axis=1))),
        tuple(map(int, filter(None, (settings.get("pipeline_layers") or "").split(",")))),
    )


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


def better_layers(pipeline: Pipeline, least_last: int) -> tuple[int, ...] | None:
    """The layers of each stage with which the longest is shortest, from the measured seconds; None where they are not
    known, or where those that it has are as good.

    A layer takes what it takes on the stages but the last; what that one takes beyond its layers is the head.
    """
    layers, tau = np.array(pipeline.layers), pipeline.tau_s
    if len(layers) != pipeline.stages or not layers[:-1].all():
        return None
    layer = float(tau[:-1].sum() / layers[:-1].sum())
    head = max(0.0, float(tau[-1]) - layer * int(layers[-1]))
    total, others = int(layers.sum()), pipeline.stages - 1

    def longest(last):
        return max(-(-(total - last) // others) * layer, last * layer + head)

    last = min(range(least_last, total - others + 1), key=longest)
    if longest(last) >= max(float(layers[:-1].max()) * layer, float(layers[-1]) * layer + head) * (1 - 1e-9):
        return None
    shares = [(total - last) * (stage + 1) // others - (total - last) * stage // others for stage in range(others)]
    return (*shares, last)
