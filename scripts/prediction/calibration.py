"""The cost model held against the run that asks it, and how far its word on other strategies goes.

A run knows what of its own exchange its steps showed, the model what they should have shown. Their ratio, the factor,
has two parts. What all exchanges have in common (links that carry less than a probe saw, cores that ranks share, other
jobs) holds for another strategy as well; what is this strategy's alone (the algorithm inside MPI's call, the latency of
its many messages) does not. One run cannot tell them apart: a prediction takes the whole factor, and its range reaches
as far as if half of the error were this strategy's alone, or all of it where one of the two strategies calls MPI's
collectives, or exchanges while it computes, and the other does not. Both ends are further out by the model's known
error.
"""

import math
from dataclasses import dataclass

import numpy as np

from scripts.prediction.predictor import PredictedStep

EXPLAINED = (0.5, 2.0)  # factors: beyond, something took the time that the model does not know
TRIFLE = 0.05  # of a step: by so little the factor may miss what was measured, where little of the exchange shows
# Another strategy's exchange over the calibrated prediction: 19 of 20 pairs in docs/benchmarks-exchange.md are nearer.
OWN_MESSAGES_ERROR, LIBRARY_ERROR = 0.15, 0.25
NOTCH = 1.57  # quartile ranges over sqrt(n): medians that differ by more differ at 95% (McGill, Tukey, Larsen 1978)
HALVINGS = 60

UNEXPLAINED = "the model does not explain this run"
FASTER, SLOWER, UNCLEAR, THIS_RUN = "faster", "slower", "no clear winner", "this run"


@dataclass(frozen=True)
class MeasuredStep:
    """Medians over a run's steps, in seconds. error_s: of step_s; transfer_s: what a network that takes no time would
    save; update_s: of the rank that updates longest."""

    step_s: float
    error_s: float
    transfer_s: float
    update_s: float

    @property
    def work_s(self) -> float:
        """What is neither exchange nor update."""
        return max(self.step_s - self.transfer_s - self.update_s, 0.0)

    @property
    def range(self) -> tuple[float, float]:
        return self.step_s - self.error_s, self.step_s + self.error_s


def measured_step(steps_s: np.ndarray, transfer_s: float, update_s: float) -> MeasuredStep:
    """steps_s: (S,) seconds of each step."""
    low, middle, high = np.quantile(steps_s, (0.25, 0.5, 0.75))
    return MeasuredStep(float(middle), float(NOTCH * (high - low) / math.sqrt(len(steps_s))), transfer_s, update_s)


@dataclass(frozen=True)
class Calibration:
    """What the model says of other strategies, as this run corrects it.

    reason: why it says nothing, None where it does; own: the run's own step as predicted, None where it is not;
    overlapped: whether the run exchanged while it computed; factor: measured over predicted time of its exchange.
    """

    measured: MeasuredStep
    reason: str | None = None
    own: PredictedStep | None = None
    overlapped: bool = False
    factor: float = 1.0

    def step_s(self, step: PredictedStep, overlapped: bool) -> float:
        """Of the run's own strategy that is what was measured."""
        return self._step_s(step, overlapped, self.factor)

    def range(self, step: PredictedStep, overlapped: bool) -> tuple[float, float]:
        """Between which seconds a step with that strategy is to be expected."""
        if self._is_own(step, overlapped):
            return self.measured.range
        algorithms = [bool(one.exchange.algorithms) for one in (self.own, step)]
        error = LIBRARY_ERROR if any(algorithms) else OWN_MESSAGES_ERROR
        overlaps = overlapped and step.overlap is not None
        is_alike = algorithms[0] == algorithms[1] and overlaps == self.overlapped
        common = math.sqrt(self.factor) if is_alike else 1.0
        low, high = sorted((self.factor, common))
        return self._step_s(step, overlapped, low / (1 + error)), self._step_s(step, overlapped, high * (1 + error))

    def compared(self, step: PredictedStep, overlapped: bool) -> str:
        """FASTER or SLOWER than the run, or UNCLEAR where the two ranges overlap; of the run's own step THIS_RUN."""
        if self._is_own(step, overlapped):
            return THIS_RUN
        (low, high), (own_low, own_high) = self.range(step, overlapped), self.measured.range
        return FASTER if high < own_low else SLOWER if low > own_high else UNCLEAR

    def facts(self) -> dict:
        """For JSON; None for what is not known."""
        is_known = self.own is not None
        return {
            "strategy": self.own.name if is_known else None,
            "overlap": self.overlapped,
            "reason": self.reason,
            "factor": None if self.reason else self.factor,
            "predicted_step_s": self.own.seconds(self.overlapped) if is_known else None,
            "predicted_exchange_s": shown_s(self.own, self.overlapped) if is_known else None,
            "measured_step_s": self.measured.step_s,
            "measured_step_range_s": list(self.measured.range),
            "measured_exchange_s": self.measured.transfer_s,
        }

    def _is_own(self, step: PredictedStep, overlapped: bool) -> bool:
        return (step.name, overlapped and step.overlap is not None) == (self.own.name, self.overlapped)

    def _step_s(self, step: PredictedStep, overlapped: bool, factor: float) -> float:
        own_s = self.own.scaled(self.factor).seconds(self.overlapped)
        return self.measured.step_s + (step.scaled(factor).seconds(overlapped) - own_s)


def calibrate(measured: MeasuredStep, own: PredictedStep, overlapped: bool) -> Calibration:
    """own: the step of the run's own strategy, as predicted with the run's own computing."""
    if own.exchange is None:
        return Calibration(measured, own.unknown)
    overlapped = overlapped and own.overlap is not None
    factor = factor_of(own, overlapped, measured.transfer_s)
    missed_s = abs(shown_s(own.scaled(factor), overlapped) - measured.transfer_s)
    if missed_s <= TRIFLE * measured.step_s:
        return Calibration(measured, None, own, overlapped, factor)
    low, high = EXPLAINED
    predicted_s = shown_s(own, overlapped)
    reason = f"its exchange takes {measured.transfer_s * 1e3:.3g} ms of a step, the model says {predicted_s * 1e3:.3g} "
    return Calibration(measured, f"{reason}ms; expected {low:g} to {high:g} times that", own, overlapped)


def shown_s(step: PredictedStep, overlapped: bool) -> float:
    """Seconds that a step is longer for its exchange."""
    return step.seconds(overlapped) - step.compute_s - step.update_s


def factor_of(own: PredictedStep, overlapped: bool, transfer_s: float) -> float:
    """By which the exchange is to be scaled so that transfer_s of it shows; the nearest of EXPLAINED if none does.

    What shows grows with the factor: in proportion without overlap; with it only as far as computing does not hide it.
    """
    low, high = EXPLAINED
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if shown_s(own.scaled(middle), overlapped) < transfer_s else (low, middle)
    return high
