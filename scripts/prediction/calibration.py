"""Calibrate the cost model with a measured run, and bound the error of its predictions for other strategies.

The factor is the measured exposed exchange of the run divided by the predicted one. Some causes slow down all exchanges
(links slower than probed, cores that ranks share, other jobs), so they apply to other strategies as well. Other causes
belong to the run's strategy (the algorithm inside MPI's call, the latency of many messages). One run cannot tell them
apart, so a prediction uses the whole factor. Its range assumes that half of the error belongs to the run's strategy, or
all of it if only one of the two strategies calls MPI's collectives, or only one overlaps. The model's known error
widens the range at both ends.
"""

import math
from dataclasses import dataclass

import numpy as np

from scripts.prediction.predictor import PredictedStep

EXPLAINED = (0.5, 2.0)  # factors; outside this range the model misses some cause
TRIFLE = 0.05  # of a step: the factor may miss the measurement by this much if little of the exchange is exposed
# Relative errors of calibrated predictions for other strategies: 19 of 20 pairs in docs/measurements.json are smaller.
OWN_MESSAGES_ERROR = 0.15
LIBRARY_ERROR = 0.25
NOTCH = 1.57  # quartile ranges over sqrt(n); medians further apart differ at 95% (McGill, Tukey, Larsen 1978)
HALVINGS = 60

UNEXPLAINED = "the model does not explain this run"
FASTER = "faster"
SLOWER = "slower"
UNCLEAR = "no clear winner"
THIS_RUN = "this run"


@dataclass(frozen=True)
class MeasuredStep:
    """Medians over a run's steps, in seconds.

    error_s: the error of step_s. transfer_s: what an infinitely fast network would save. update_s: the longest update
    of any rank.
    """

    step_s: float
    error_s: float
    transfer_s: float
    update_s: float

    @property
    def work_s(self) -> float:
        """The seconds of a step without exchange and update."""
        return max(self.step_s - self.transfer_s - self.update_s, 0.0)

    @property
    def range(self) -> tuple[float, float]:
        return self.step_s - self.error_s, self.step_s + self.error_s


def measured_step(steps_s: np.ndarray, transfer_s: float, update_s: float) -> MeasuredStep:
    """Return the medians and their error. steps_s: (S,) seconds of each step."""
    low, middle, high = np.quantile(steps_s, (0.25, 0.5, 0.75))
    return MeasuredStep(float(middle), float(NOTCH * (high - low) / math.sqrt(len(steps_s))), transfer_s, update_s)


@dataclass(frozen=True)
class Calibration:
    """Predictions for other strategies, corrected by a measured run.

    reason: why there are no predictions, else None. own: the predicted step of the run itself, None if unknown.
    overlapped: whether the run overlapped exchange and compute. factor: measured over predicted time of its exchange.
    """

    measured: MeasuredStep
    reason: str | None = None
    own: PredictedStep | None = None
    overlapped: bool = False
    factor: float = 1.0

    def step_s(self, step: PredictedStep, overlapped: bool, factor: float | None = None) -> float:
        """Return the corrected seconds of a step; for the run's own strategy the measured seconds.

        factor: of the step's exchange, None for the calibration's.
        """
        own_s = self.own.scaled(self.factor).seconds(self.overlapped)
        step = step.scaled(self.factor if factor is None else factor)
        return self.measured.step_s + (step.seconds(overlapped) - own_s)

    def range(self, step: PredictedStep, overlapped: bool) -> tuple[float, float]:
        """Return the shortest and the longest seconds that a step with this strategy may take."""
        if self._is_own(step, overlapped):
            return self.measured.range
        algorithms = [bool(one.exchange.algorithms) for one in (self.own, step)]
        error = LIBRARY_ERROR if any(algorithms) else OWN_MESSAGES_ERROR
        overlaps = overlapped and step.overlap is not None
        is_alike = algorithms[0] == algorithms[1] and overlaps == self.overlapped
        common = math.sqrt(self.factor) if is_alike else 1.0
        low, high = sorted((self.factor, common))
        return self.step_s(step, overlapped, low / (1 + error)), self.step_s(step, overlapped, high * (1 + error))

    def compared(self, step: PredictedStep, overlapped: bool) -> str:
        """Return FASTER or SLOWER than the run, UNCLEAR if the ranges overlap, THIS_RUN for the run's own step."""
        if self._is_own(step, overlapped):
            return THIS_RUN
        low, high = self.range(step, overlapped)
        own_low, own_high = self.measured.range
        return FASTER if high < own_low else SLOWER if low > own_high else UNCLEAR

    def facts(self) -> dict:
        """Return the calibration for JSON; unknown values are None."""
        is_known = self.own is not None
        return {
            "strategy": self.own.name if is_known else None,
            "overlap": self.overlapped,
            "reason": self.reason,
            "factor": None if self.reason else self.factor,
            "predicted_step_s": self.own.seconds(self.overlapped) if is_known else None,
            "predicted_exchange_s": exposed_s(self.own, self.overlapped) if is_known else None,
            "measured_step_s": self.measured.step_s,
            "measured_step_range_s": list(self.measured.range),
            "measured_exchange_s": self.measured.transfer_s,
        }

    def _is_own(self, step: PredictedStep, overlapped: bool) -> bool:
        return (step.name, overlapped and step.overlap is not None) == (self.own.name, self.overlapped)


def calibrate(measured: MeasuredStep, own: PredictedStep, overlapped: bool) -> Calibration:
    """Compare the measured step with `own`, the prediction for the run's strategy and compute time."""
    if own.exchange is None:
        return Calibration(measured, own.unknown)
    overlapped = overlapped and own.overlap is not None
    factor = factor_of(own, overlapped, measured.transfer_s)
    missed_s = abs(exposed_s(own.scaled(factor), overlapped) - measured.transfer_s)
    if missed_s <= TRIFLE * measured.step_s:
        return Calibration(measured, None, own, overlapped, factor)
    low, high = EXPLAINED
    predicted_s = exposed_s(own, overlapped)
    reason = f"its exchange takes {measured.transfer_s * 1e3:.3g} ms of a step, the model says {predicted_s * 1e3:.3g} "
    return Calibration(measured, f"{reason}ms; expected {low:g} to {high:g} times that", own, overlapped)


def exposed_s(step: PredictedStep, overlapped: bool) -> float:
    """Return the exposed exchange of a step, in seconds."""
    return step.seconds(overlapped) - step.compute_s - step.update_seconds(overlapped)


def factor_of(own: PredictedStep, overlapped: bool, transfer_s: float) -> float:
    """Return the factor that makes the exposed exchange transfer_s, clipped to EXPLAINED.

    The exposed exchange grows with the factor, so bisection finds it.
    """
    low, high = EXPLAINED
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if exposed_s(own.scaled(middle), overlapped) < transfer_s else (low, middle)
    return high
