"""What follows from a run's complete settings: parts made of them, what config.json says, what a checkpoint keeps."""

from dataclasses import asdict
from pathlib import Path

from gpt2.config import GPT2Config
from gpt2.optimizer import AdamWSettings, LearningRateSchedule
from scripts.settings.model_parallel import copies
from scripts.settings.training import Settings, flags
from strategies.checks import worker_count

# What LearningRateSchedule is made of, in its order.
SCHEDULE = ("schedule", "lr", "min_lr", "warmup", "lr_steps")
OPTIMIZER = ("weight_decay", "beta1", "beta2", "eps", "grad_clip", "skip_outliers")
# What changes the curve by rounding alone.
ROUNDING = ("dtype", "tf32", "stochastic_rounding", "wire", "error_feedback")


def resolved(s: Settings, config: GPT2Config, threads: int, path: Path) -> dict:
    """Every setting as it is used, for the printed table and config.json. s: complete, with no "auto" left.

    model: the name that the shape began with, None where only a file (--init) says it. What no default decides is None.
    """
    model = s.model or ("baby" if s.init == "random" else None)
    used = {item.name: getattr(s, item.name) for item in flags()}
    return used | asdict(config) | {"model": model, "threads": threads, "out": str(path)}


def lasting(s: Settings, ranks: int) -> dict:
    """What shapes the losses of a run: a checkpoint holds it, and a run that goes on is held to it.

    validation_windows: how many of them a validation takes, 0 for all, None without validations.
    """
    windows = s.eval_steps * s.batch_size * worker_count(s.server, copies(s, ranks)) if s.eval_every else None
    kept = {name: getattr(s, name) for name in (*SCHEDULE, *OPTIMIZER, *ROUNDING)}
    return kept | {"validation_windows": windows}


def adamw_settings(s: Settings) -> AdamWSettings:
    return AdamWSettings(s.beta1, s.beta2, s.eps, s.weight_decay, s.stochastic_rounding, s.seed)


def learning_rate(s: Settings) -> LearningRateSchedule:
    return LearningRateSchedule(*(getattr(s, name) for name in SCHEDULE))


def doubtful_warmup(s: Settings) -> str:
    """Say what is odd about the length of the warm-up; "" if nothing is. s: complete.

    A run that is shorter than the default warm-up is a trial, of which nothing needs to be said.
    """
    rate = learning_rate(s)
    if s.warmup > s.steps:
        if "warmup" not in s.typed and not s.preset:
            return ""
        end = f"the learning rate ends at {rate.at(s.steps):.3g}, below --lr {s.lr:g}"
        return f"--warmup {s.warmup} is above --steps {s.steps}: {end}"
    if s.warmup == s.steps or rate.decay_steps <= max(0, s.lr_steps - s.warmup):
        return ""
    return (
        f"--warmup {s.warmup} ends after --schedule {s.schedule} has begun to lower the learning rate (--lr-steps "
        f"{s.lr_steps}): it drops from {s.lr:.3g} to {rate.at(s.warmup + 1):.3g} at once"
    )


def computing_ranks(s: Settings, ranks: int) -> list[bool]:
    """For each rank, whether it computes gradients: all but a dedicated server, which is rank 0."""
    return [rank > 0 or s.server != "dedicated" for rank in range(ranks)]


def global_batch(s: Settings, ranks: int) -> int:
    """Sequences of one step."""
    return s.batch_size * s.grad_accum * worker_count(s.server, copies(s, ranks))
