"""Compare the loss curves of several runs as closely as their settings allow.

Runs of different experiments (another model, batch, learning rate, seed or text) are not compared, nor are those whose
strategy changes the arithmetic (same_weights in config.json is false) expected to agree. All others differ only in
rounding, which depends on the order of sums (strategy, ranks) and is coarser with bfloat16. Training amplifies each
difference. So two curves may differ at a step by the larger of
- ROUNDING, a fraction of the loss, and
- GROWTH times the largest difference that was seen at least WINDOW steps earlier.
This finds a fault in the first steps even if training is chaotic, and in later steps if it is calm. The norm of the
first step's gradients, before parameters differ, shows what AdamW hides: gradients with a wrong scale.

Largest differences between 10 runs of 1 to 4 ranks, 300 or 400 steps of tiny models:

                                         losses
                                         to step 10    to step 20    to the end           first norms, relative
    float32, another order               7e-8          2e-7          2e-5                 2e-6
    bfloat16 gradients on the wire       4e-6          9e-6          2e-3                 2e-4
    zero-2: also bfloat16 parameters     2e-3          4e-3          9e-3, 2^-8 of it     2e-4

With five times the default learning rate, differences above ROUNDING grow at most 67-fold in 10 steps. The limits for
other kernels, TF32 and bfloat16 models follow from the bits of the mantissa and have not been measured.
"""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from traces.verdict.summary import TimedRun

GROWTH = 100.0
WINDOW = 10


@dataclass(frozen=True)
class Rounding:
    """The largest fraction of the loss and of the gradient norm by which runs may differ, and the reason."""

    loss: float
    norm: float
    reason: str


# From fine to coarse.
ROUNDING = {
    "order": Rounding(2**-12, 2**-13, "float32 sums in another order"),
    "kernels": Rounding(2**-11, 2**-13, "other kernels round float32 differently"),
    "tf32": Rounding(2**-9, 2**-8, "TF32 rounds to 11 bits"),
    "wire": Rounding(2**-8, 2**-8, "bfloat16 on the wire rounds to 8 bits"),
    "int8": Rounding(2**-7, 2**-7, "int8 on the wire rounds to a 127th of a block's largest value"),
    "dtype": Rounding(2**-7, 2**-5, "a bfloat16 model rounds to 8 bits"),
}
# Settings that make another experiment if they differ; the first ones only where both runs have them.
IF_BOTH_SAY = ("model", "n_layer", "n_head", "n_embd", "context", "vocab_size", "tokenizer", "seq_len")
EXPERIMENT = (
    "init", "train_data", "text", "corpus", "seed", "shuffle", "weight_decay", "beta1", "beta2", "eps", "grad_clip",
    "skip_outliers",
)  # fmt: skip
# These must be equal in each step's line of the log, whichever flags set them.
LOGGED = {"lr": "learning rate", "tokens": "tokens a step"}


@dataclass(frozen=True)
class Comparison:
    """kind: "agree", "differ" or "other" (experiments). title, subtitle: of a figure of the curves."""

    kind: str
    title: str
    subtitle: str

    @property
    def sentence(self) -> str:
        """The sentence below a table."""
        return self.subtitle if self.kind == "agree" else ": ".join(filter(None, (self.title, self.subtitle)))


@dataclass(frozen=True)
class _Distance:
    """The distance between two runs at the worst step.

    what: "loss curves" or "gradients". excess: the distance divided by `allowed`, which rounding explains. text: the
    distance in words. largest: the largest difference of the losses.
    """

    what: str
    excess: float
    text: str
    allowed: float
    reason: str
    largest: float
    largest_at: int


def compare_curves(measured: list[TimedRun]) -> Comparison | None:
    """Compare each pair of runs. None if fewer than two have a log and ranks that train together."""
    measured = [one for one in measured if one.figures["exchanges"] and one.run.log]
    if len(measured) < 2:
        return None
    for one, other in combinations(measured, 2):
        if text := other_experiment(one, other):
            return Comparison("other", "Different experiments: their losses are not compared", text)
    exact = [one for one in measured if one.run.config.get("same_weights", True)]
    if len(exact) < len(measured):
        found = compare_curves(exact)
        return found if found and found.kind == "differ" else _other_arithmetic(measured)
    distances = [_distance(one, other) for one, other in combinations(measured, 2)]
    if None in distances:
        return Comparison("other", "The runs have no step in common: their losses are not compared", "")
    worst = max(distances, key=lambda distance: distance.excess)
    if worst.excess > 1:
        return Comparison("differ", f"The {worst.what} differ", worst.text)
    title = f"The same loss curve from {'both' if len(measured) == 2 else f'all {len(measured)}'} runs"
    largest = max(distances, key=lambda distance: distance.largest)
    if not largest.largest:
        return Comparison("agree", title, "loss curves agree: no difference at any step")
    at = f"largest difference {largest.largest:.1g} at step {largest.largest_at}"
    return Comparison("agree", title, f"loss curves agree within {worst.allowed:.1g} ({worst.reason}; {at})")


def _other_arithmetic(measured: list[TimedRun]) -> Comparison:
    """State the last losses of runs of which some do not give the same weights by design, and how far the training
    losses are from the first run's on average."""
    name = "val_loss" if all("val_loss" in one.run.log[-1] for one in measured) else "loss"
    first = {row["step"]: row["loss"] for row in measured[0].run.log if row.get("loss") is not None}
    found = []
    for one in measured:
        last = f"{one.label} {one.run.log[-1].get(name, math.nan):.3f}"
        rows = [row for row in one.run.log if row.get("loss") is not None and row["step"] in first]
        apart = [abs(row["loss"] - first[row["step"]]) for row in rows]
        found.append(f"{last} ({np.mean(apart):.1e})" if apart and one is not measured[0] else last)
    title = "Different arithmetic: the losses are compared, not expected to agree"
    kind = "validation" if name == "val_loss" else "training"
    distance = f"mean distance of the training losses from {measured[0].label}'s"
    return Comparison("other", title, f"last {kind} loss ({distance}): {', '.join(found)}")


def other_experiment(one: TimedRun, other: TimedRun) -> str:
    """Return the settings that make the runs different experiments, as a sentence; "" if there are none."""
    found = []
    for name in (*IF_BOTH_SAY, *EXPERIMENT, "parameters"):
        configs = [each.run.config if name == "parameters" else each.run.config["settings"] for each in (one, other)]
        a, b = (config.get(name) for config in configs)
        if a != b and (name in EXPERIMENT or None not in (a, b)):
            found.append((name.replace("_", "-"), a, b, ""))
    logs = [{row["step"]: row for row in each.run.log} for each in (one, other)]
    for field, name in LOGGED.items():
        for step in sorted(set(logs[0]) & set(logs[1])):
            a, b = (log[step].get(field) for log in logs)
            if None not in (a, b) and not math.isclose(a, b, rel_tol=1e-6):
                found.append((name, a, b, f" at step {step}"))
                break
    sentences = [f"{name} {_shown(a)} with {one.label}, {_shown(b)} with {other.label}{at}" for name, a, b, at in found]
    return "; ".join(sentences[:2])


def _shown(value) -> str:
    return f"{value:g}" if type(value) is float else "as default" if value is None else str(value)


def rounding_of(one: TimedRun, other: TimedRun) -> Rounding:
    """Return the coarsest rounding by which two runs of one experiment may differ."""
    settings = [each.run.config["settings"] for each in (one, other)]
    found = {
        "order": True,
        "kernels": len({each.get("backend", "numpy") for each in settings}) > 1,
        "tf32": any(each.get("tf32") for each in settings),
        "wire": any(each.get("wire") == "bfloat16" for each in settings),
        "int8": any(each.get("wire") == "int8" for each in settings),
        "dtype": any(each.get("dtype") == "bfloat16" for each in settings),
    }
    return [ROUNDING[name] for name in ROUNDING if found[name]][-1]


def tolerance(steps: np.ndarray, loss: np.ndarray, distance: np.ndarray, rounding: Rounding) -> np.ndarray:
    """Return (S,) how far apart two curves may be at each step. distance: (S,) how far apart they are."""
    earlier = np.searchsorted(steps, steps - WINDOW, side="right")  # number of steps that lie WINDOW or more before
    largest = np.concatenate([[0.0], np.maximum.accumulate(distance)])[earlier]
    return np.maximum(rounding.loss * np.abs(loss), GROWTH * largest)


def _distance(one: TimedRun, other: TimedRun) -> _Distance | None:
    """Measure how far apart two runs are, in losses and in the first gradient norm. None if no step is in both logs."""
    logs = [{row["step"]: row for row in each.run.log if row.get("loss") is not None} for each in (one, other)]
    steps = np.array(sorted(set(logs[0]) & set(logs[1])), np.int64)
    if not len(steps):
        return None
    losses = np.array([[log[step]["loss"] for step in steps] for log in logs])
    rounding = rounding_of(one, other)
    both_lost = np.isnan(losses).all(axis=0)  # both have diverged: no difference
    distance = np.where(both_lost, 0.0, np.abs(losses[0] - losses[1]))
    allowed = np.where(both_lost, 1.0, tolerance(steps, losses.min(axis=0), distance, rounding))
    with np.errstate(invalid="ignore"):
        excess = np.where(np.isnan(distance), np.inf, distance / allowed)
    worst = int(np.argmax(excess))
    largest = int(np.argmax(distance))
    what = "loss curves"
    text = f"{distance[worst]:.2g} apart at step {steps[worst]}, rounding explains {allowed[worst]:.1g}"
    if np.isnan(distance[worst]):
        text = f"one loss is no longer a number at step {steps[worst]}, the other is; rounding does not explain it"
    norms = [log[steps[0]].get("grad_norm") for log in logs]
    if None not in norms and steps[0] == 1 and max(norms) > 0:
        apart = abs(norms[0] - norms[1]) / max(norms)
        if apart / rounding.norm > max(1.0, excess[worst]):
            what = "gradients"
            excess[worst] = apart / rounding.norm
            text = f"gradient norms {apart:.2g} of their size apart at step 1, rounding explains {rounding.norm:.1g}"
    text = f"{one.label} and {other.label}: {text} ({rounding.reason})"
    return _Distance(
        what, float(excess[worst]), text, float(allowed[worst]), rounding.reason, float(distance[largest]),
        int(steps[largest]),
    )  # fmt: skip
