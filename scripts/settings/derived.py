"""Derive values from a run's complete settings, for the printed table, config.json and checkpoints."""

from dataclasses import asdict
from pathlib import Path

from gpt2.config import GPT2Config
from gpt2.optimizer import AdamWSettings, LearningRateSchedule
from scripts.settings.model_parallel import copies
from scripts.settings.training import Settings, flags
from strategies import STRATEGIES, find, is_auto
from strategies.base import OuterSteps
from strategies.compatibility import worker_count

# The arguments of LearningRateSchedule, in order.
SCHEDULE = ("schedule", "lr", "min_lr", "warmup", "lr_steps")
OPTIMIZER = ("weight_decay", "beta1", "beta2", "eps", "grad_clip", "skip_outliers")
# Flags that belong to one strategy alone, and change its loss curve.
OF_STRATEGIES = tuple(name for kind in STRATEGIES.values() for name in kind.traits.flags)
# Settings that change the loss curve only by rounding.
ROUNDING = ("dtype", "tf32", "stochastic_rounding", "wire", "error_feedback")


def resolved(settings: Settings, config: GPT2Config, threads: int, path: Path) -> dict:
    """Return the value in use of every setting, for the printed table and config.json. None may still be "auto".

    The result's `model` names the preset shape; it is None if the shape comes from a file (--init).
    """
    model = settings.model or ("baby" if settings.init == "random" else None)
    used = {item.name: getattr(settings, item.name) for item in flags()}
    return used | asdict(config) | {"model": model, "threads": threads, "out": str(path)}


def lasting(settings: Settings, ranks: int) -> dict:
    """Return the settings that affect the loss curve. A checkpoint stores them, and a resumed run must keep them.

    validation_windows: how many windows a validation takes, 0 for all, None without validations.
    """
    windows = None
    if settings.eval_every:
        windows = settings.eval_steps * settings.batch_size * workers(settings, ranks)
    own = () if is_auto(settings.strategy) else find(settings.strategy).traits.flags
    kept = {name: getattr(settings, name) for name in (*SCHEDULE, *OPTIMIZER, *ROUNDING, *own)}
    return kept | {"validation_windows": windows}


def adamw_settings(settings: Settings) -> AdamWSettings:
    return AdamWSettings(
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        rounding_seed=settings.seed if settings.stochastic_rounding else None,
    )


def outer_steps(settings: Settings) -> OuterSteps:
    return OuterSteps(
        settings.local_steps, settings.outer_lr, settings.outer_momentum, settings.replica, settings.fragments
    )


def learning_rate(settings: Settings) -> LearningRateSchedule:
    return LearningRateSchedule(*(getattr(settings, name) for name in SCHEDULE))


def doubtful_warmup(settings: Settings) -> str:
    """Return a warning if the warm-up is too long, else "". settings: complete.

    A run that is shorter than the default warm-up is taken for a trial and gets no warning.
    """
    rate = learning_rate(settings)
    warmup = settings.warmup
    if warmup > settings.steps:
        if "warmup" not in settings.typed and not settings.preset:
            return ""
        end = f"the learning rate ends at {rate.at(settings.steps):.3g}, below --lr {settings.lr:g}"
        return f"--warmup {warmup} is above --steps {settings.steps}: {end}"
    if warmup == settings.steps or rate.decay_steps <= max(0, settings.lr_steps - warmup):
        return ""
    return (
        f"--warmup {warmup} ends after --schedule {settings.schedule} has begun to lower the learning rate (--lr-steps "
        f"{settings.lr_steps}): it drops from {settings.lr:.3g} to {rate.at(warmup + 1):.3g} at once"
    )


def unused_steps(settings: Settings) -> str:
    """Return a warning if the last steps stay out of the parameters that the run leaves, else ""."""
    last = settings.steps % settings.local_steps
    if not last or is_auto(settings.strategy) or not find(settings.strategy).traits.takes_local_steps:
        return ""
    return (
        f"--steps {settings.steps} is not a multiple of --local-steps {settings.local_steps}: the last {last} steps do "
        "not enter the global parameters"
    )


def computing_ranks(settings: Settings, ranks: int) -> list[bool]:
    """Return for each rank whether it computes gradients: all but rank 0 if that is a dedicated server."""
    return [rank > 0 or settings.server != "dedicated" for rank in range(ranks)]


def workers(settings: Settings, ranks: int) -> int:
    """Return how many workers share a global batch. Ranks that share a model count as one worker."""
    return worker_count(settings.server, copies(settings, ranks))


def global_batch(settings: Settings, ranks: int) -> int:
    """Return the number of sequences of a step, on all ranks together."""
    return settings.batch_size * settings.grad_accum * workers(settings, ranks)
