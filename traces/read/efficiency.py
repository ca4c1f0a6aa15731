"""POP's efficiencies of a run: how much of its time is useful computing, and what the rest is lost to.

Definitions: the POP Centre of Excellence's standard metrics for parallel performance (co-design.pop-coe.eu/metrics).
Useful is what a rank spends in forward, backward and update. With u_i a rank's useful seconds, T the runtime and
T_ideal the runtime on a network that takes no time:

    load balance   mean(u) / max(u)          serialization   max(u) / T_ideal      transfer   T_ideal / T
    communication  serialization * transfer = max(u) / T     parallel   load balance * communication = mean(u) / T

T_ideal comes from replay.py.
"""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes
from traces.read.runs import Run
from traces.record.phases import COMPUTE, INDEX


@dataclass(frozen=True)
class Efficiency:
    """useful_s: (R,) float64; runtime_s, ideal_s: over the same steps; tokens: trained on in them, None if unknown."""

    useful_s: np.ndarray
    runtime_s: float
    ideal_s: float
    tokens: float | None = None

    @property
    def load_balance(self) -> float:
        return float(self.useful_s.mean() / self.useful_s.max())

    @property
    def serialization(self) -> float:
        return float(self.useful_s.max() / self.ideal_s)

    @property
    def transfer(self) -> float:
        return self.ideal_s / self.runtime_s

    @property
    def communication(self) -> float:
        return self.serialization * self.transfer

    @property
    def parallel(self) -> float:
        return self.load_balance * self.communication

    @property
    def lost(self) -> dict[str, float]:
        """Shares of the runtime that are not useful, by cause; with the parallel efficiency they add up to 1."""
        longest = float(self.useful_s.max())
        seconds = {
            "load_balance": longest - float(self.useful_s.mean()),
            "serialization": self.ideal_s - longest,
            "transfer": self.runtime_s - self.ideal_s,
        }
        return {name: value / self.runtime_s for name, value in seconds.items()}

    def as_dict(self) -> dict:
        names = ("load_balance", "serialization", "transfer", "communication", "parallel")
        return {name: getattr(self, name) for name in names} | {"lost": self.lost}


def efficiency(run: Run, times: StepTimes, ideal_s: np.ndarray) -> Efficiency:
    """Of all measured steps together; ideal_s: (S,) as replay.ideal_runtimes gives them.

    The update of a sharded optimizer is useful on each of its ranks.
    """
    useful_s = times.seconds[:, :, [INDEX[name] for name in COMPUTE]].sum(axis=(0, 2))
    runtime_s = float(step_runtimes(times).sum())
    # Clocks that differ by microseconds may make a replayed step longer than the step.
    ideal = max(min(float(ideal_s.sum()), runtime_s), float(useful_s.max()))
    kept = set(times.steps.tolist())
    rows = [row for row in run.log if row["step"] in kept and {"tokens_per_s", "step_s"} <= row.keys()]
    tokens = sum(row["tokens_per_s"] * row["step_s"] for row in rows) or None
    return Efficiency(useful_s, runtime_s, ideal, tokens)


def scaling(runs: list[Efficiency]) -> list[dict[str, float]]:
    """How each run compares with the first, per token: runs may differ in ranks and in their batch.

    computation: useful seconds a token of all ranks together, first over this; global: computation * parallel
    efficiency; speedup: tokens a second over the first's. ValueError where a run's tokens are not known.
    """
    if any(one.tokens is None for one in runs):
        raise ValueError("scaling compares seconds per token, and a run's log has no tokens")
    first = runs[0]
    rows = []
    for one in runs:
        computation = float((first.useful_s.sum() / first.tokens) / (one.useful_s.sum() / one.tokens))
        speedup = (one.tokens / one.runtime_s) / (first.tokens / first.runtime_s)
        rows.append({"computation": computation, "global": computation * one.parallel, "speedup": speedup})
    return rows


def step_runtimes(times: StepTimes) -> np.ndarray:
    """(S,) seconds from the first rank's start of a step to the last rank's end of it."""
    return (times.end_ns.max(axis=1) - times.start_ns.min(axis=1)) * 1e-9
