"""How long runs train until their validation loss has fallen to a target, with the spread over seeds.

Seconds are those of training steps: without start, validation, checkpoints and samples. The first step counts as much
as the second one, because it also compiles kernels and opens connections.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from traces.read.run_files import log_column
from traces.units import count_text, ratio_text, seconds_text, short_ms

HEADER = ("", "seconds", "steps", "ms per step", "last validation loss")


@dataclass(frozen=True)
class Curve:
    """The V validations of a run, each (V,) float64; seconds: of all steps before a validation. step_s: mean step."""

    steps: np.ndarray
    seconds: np.ndarray
    losses: np.ndarray
    step_s: float

    def with_steps_of(self, step_s: float) -> "Curve":
        """Return the curve of the same training if each step took step_s seconds."""
        return Curve(self.steps, self.steps * step_s, self.losses, step_s)


def curve_of(log: list[dict]) -> Curve:
    """Return a run's curve from the rows of its log.jsonl."""
    steps, seconds, losses = (log_column(log, name) for name in ("step", "step_s", "val_loss"))
    seconds[:1] = seconds[1:2] if len(seconds) > 1 else seconds
    known = np.isfinite(losses)
    return Curve(steps[known], np.cumsum(seconds)[known], losses[known], float(seconds.mean()))


def seconds_to_loss(steps, seconds, losses, target: float) -> tuple[float, float] | None:
    """Return (seconds, steps) after which the loss first is `target`; None if it never is.

    All arrays are (V,). The loss is linear between two validations. If the first validation is below the target, return
    its place: the loss may have fallen earlier.
    """
    below = np.flatnonzero(np.asarray(losses) <= target)
    if not len(below):
        return None
    after = below[0]
    before = max(after - 1, 0)
    fallen = losses[before] - losses[after]
    share = (losses[before] - target) / fallen if fallen > 0 else 1.0
    return tuple(float(values[before] + share * (values[after] - values[before])) for values in (seconds, steps))


@dataclass(frozen=True)
class Reached:
    """What the runs of one label reached. curves: one per seed. seconds, steps: of the seeds that reach the target."""

    label: str
    curves: list[Curve]
    seconds: list[float]
    steps: list[float]

    @property
    def median_s(self) -> float:
        """Seconds to the target, the median over seeds; infinite unless all seeds reach it."""
        return float(np.median(self.seconds)) if len(self.seconds) == len(self.curves) else np.inf


def reach(groups: dict[str, list[Curve]], target: float) -> list[Reached]:
    """Return what each label reached, in their order. groups: {label: the curves of its seeds}."""
    found = []
    for label, curves in groups.items():
        places = [seconds_to_loss(one.steps, one.seconds, one.losses, target) for one in curves]
        places = [place for place in places if place]
        found.append(Reached(label, curves, [place[0] for place in places], [place[1] for place in places]))
    return found


def soonest(found: list[Reached]) -> list[Reached]:
    """Return the label that reaches the target first, and those whose seeds' seconds overlap with its seconds."""
    first = min(found, key=lambda one: one.median_s)
    if first.median_s == np.inf:
        return []
    return [one for one in found if one.median_s < np.inf and min(one.seconds) <= max(first.seconds)]


def headline(found: list[Reached], target: float) -> str:
    """Return who reaches the target first, when, and how much sooner than the first label, or the slowest one."""
    first = soonest(found)
    if not first:
        return f"No strategy reaches loss {target:g}"
    names = " and ".join(one.label for one in first)
    times = " and ".join(seconds_text(one.median_s) for one in first)
    others = [one for one in found if one not in first and one.median_s < np.inf]
    text = f"{names} reach{'es' * (len(first) == 1)} loss {target:g} first: {times}"
    if not others:
        return text
    ratio = others[0].median_s / min(one.median_s for one in first)
    return f"{text}, {ratio_text(ratio)} than {others[0].label}"


def cells(found: list[Reached]) -> list[list[str]]:
    """Return the table of HEADER, one row per label; each number is "median (least to most)" over the seeds."""
    three_digits = partial(short_ms, digits=3)
    rows = []
    for one in found:
        missing = len(one.curves) - len(one.seconds)
        reached = [spread(one.seconds, three_digits), spread(one.steps, "{:.0f}".format)]
        if missing:
            who = f" by {missing} of {count_text(len(one.curves), 'seed')}" if one.seconds else ""
            reached = [f"not reached{who}", "-"]
        step = spread([1e3 * curve.step_s for curve in one.curves], three_digits)
        last = spread([curve.losses[-1] for curve in one.curves if len(curve.losses)], "{:.3f}".format)
        rows.append([one.label, *reached, step, last])
    return rows


def spread(values: list[float], text: Callable[[float], str]) -> str:
    """Return "median (least to most)", the value alone if there is one, "-" if there is none."""
    if not values:
        return "-"
    around = f" ({text(min(values))} to {text(max(values))})" if len(values) > 1 else ""
    return text(float(np.median(values))) + around
