"""Settings that changed on resume. Changes that would alter the loss curve are refused unless their flag was given;
others are reported.

A flag on the command line means that the user wants the change. A setting may also follow from another flag, such as
the length of the learning-rate schedule from --steps.
"""

from math import isclose

from gpt2.errors import UserError
from gpt2.formats.checkpoints import Checkpoint
from gpt2.optimizer import LearningRateSchedule
from scripts.settings.derived import OF_STRATEGIES, OPTIMIZER, SCHEDULE

COMPARED_STEPS = 100  # two schedules are compared at this many of the remaining steps


def changed_settings(checkpoint: Checkpoint, own: dict, typed: frozenset[str], last_step: int) -> str:
    """Describe the changes in one line, "" if none. Raise UserError if one would alter the loss curve unasked.

    own: this run's derived.lasting. typed: names of the flags on its command line. last_step: the last of the run.
    """
    steps = range(checkpoint.step + 1, last_step + 1)
    before = checkpoint.facts["settings"]
    if lacking := own.keys() - before.keys():
        raise UserError(
            f"{checkpoint.path}: its settings lack {min(lacking)}, expected those of this release: resume with the "
            "release that wrote it, or choose another --out"
        )
    changed = [name for name in own if before[name] != own[name] and steps and matters(name, before, own, steps)]
    old, new = (rates(settings, steps[:1]) for settings in (before, own))
    jumps = not same(old, new)
    bent = [name for name in changed if name in (*OPTIMIZER, *OF_STRATEGIES) or (name in SCHEDULE and jumps)]
    rate = ""
    if set(changed) & set(SCHEDULE):
        rate = f"the learning rate of step {steps.start} is {new[0]:.3g}, before {old[0]:.3g}"
    if set(bent) - typed:
        raise UserError(
            f"{checkpoint.path}: made with {flags_of(bent, before)}, this run has {flags_of(bent, own)}"
            f"{rate and f', and {rate}'}: add {flags_of(bent, before)} to continue as before, or {flags_of(bent, own)} "
            "if you intend the change"
        )
    told = ", ".join(f"{name.replace('_', '-')} {own[name]} (before {before[name]})" for name in changed)
    return told and f"changed: {told}{rate and f'; {rate}'}"


def matters(name: str, before: dict, own: dict, steps: range) -> bool:
    """Return whether a changed setting has an effect in these steps and does not just follow from another change.

    The end of a schedule has no effect during warm-up, nor on a constant rate. With --eval-every 0 there are no
    validations, and their windows are None.
    """
    if name not in SCHEDULE:
        return None not in (before[name], own[name])
    follows = all(settings["min_lr"] == settings["lr"] / 10 for settings in (before, own))  # --min-lr from --lr
    if name == "min_lr" and follows:
        return False
    names = ("lr", "min_lr") if name == "lr" and follows else (name,)
    return not same(rates(own | {each: before[each] for each in names}, steps), rates(own, steps))


def rates(settings: dict, steps: range) -> list[float]:
    """Return the learning rates of some of the steps, including the first and the last."""
    schedule = LearningRateSchedule(*(settings[name] for name in SCHEDULE))
    return [schedule.at(step) for step in (*steps[:: len(steps) // COMPARED_STEPS + 1], *steps[-1:])]


def same(one: list[float], other: list[float]) -> bool:
    return all(map(isclose, one, other))


def flags_of(names: list[str], settings: dict) -> str:
    return " ".join(f"--{name.replace('_', '-')} {settings[name]}" for name in names)
