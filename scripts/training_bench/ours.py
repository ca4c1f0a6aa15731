"""Our side of bench_training.py: a training as scripts/train.py makes it, without its log and its checkpoints."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from dist.world import ClosedTogether
from scripts.settings.training import Settings, parse_settings
from scripts.training.assemble import assemble
from scripts.training.run_lock import RunLock

# By contender: flags of train.py behind those of the user. The first exchanges nothing: what computing alone takes.
FORMS = {
    "ours, no exchange": ["--strategy", "none", "--no-exchange"],
    "ours": [],
    "ours, bfloat16 wire": ["--wire", "bfloat16"],
}
# What a run does beside its steps; a peak that is told need not be measured.
STEPS_ALONE = ["--eval-every", "0", "--trace", "off", "--stall-after", "0", "--peak-tflops", "1"]


def settings_of(name: str, training: list[str], steps: int, out: Path) -> Settings:
    """The settings of a contender's training. training: flags of train.py."""
    flags = [*STEPS_ALONE, *training, *FORMS[name], "--steps", str(steps), "--out", str(out / name.replace(" ", "-"))]
    return parse_settings("", flags)


def train(world, name: str, training: list[str], steps: int, out: Path) -> Iterator[tuple[float, float]]:
    """Yield the seconds and the mean loss of each step of a training from its beginning. Collective.

    out: a folder, in which its run folder lies meanwhile, with nothing but its lock.
    """
    settings = settings_of(name, training, steps, out)
    with RunLock(world) as lock, ClosedTogether() as resources:
        parts = assemble(settings, world, lock, resources)
        with closing(parts.tracer), parts.checkpoints:
            for step in parts.steps:
                yield make_step(parts, step)
            for _ in parts.model.ranges():  # what is still being gathered arrives
                pass


def make_step(parts, step: int) -> tuple[float, float]:
    """As the loop of scripts/train.py makes it: (seconds of this rank, from meeting to meeting; mean loss)."""
    worker, strategy, tracer = parts.worker, parts.strategy, parts.tracer
    with tracer.step(step):
        loss_part = worker.gradients(step, strategy.gradients_final)
        norm = strategy.update(parts.learning_rate.at(step))
        with tracer.phase("wait"):
            meeting = parts.meeting_point.meet(loss_part, None if strategy.clipping.skips else norm)
    return tracer.seconds("step"), meeting.loss
