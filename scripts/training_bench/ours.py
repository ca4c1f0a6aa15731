"""Our contenders of bench_training.py: a training like scripts/train.py, without log and checkpoints."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from dist.world import ClosedTogether
from scripts.settings.training import Settings, parse_settings
from scripts.training.assemble import assemble
from scripts.training.run_lock import RunLock

# By contender: flags of train.py after those of the user. The first exchanges nothing: its step is computing alone.
FORMS = {
    "ours, no exchange": ["--strategy", "none", "--no-exchange"],
    "ours": [],
    "ours, bfloat16 wire": ["--wire", "bfloat16"],
}
# Switch off everything beside the steps. A peak that is given is not measured.
STEPS_ALONE = ["--eval-every", "0", "--trace", "off", "--stall-after", "0", "--peak-tflops", "1"]


def settings_of(name: str, training: list[str], steps: int, out: Path) -> Settings:
    """Return the settings of a contender's training. training: flags of train.py."""
    flags = [*STEPS_ALONE, *training, *FORMS[name], "--steps", str(steps), "--out", str(out / name.replace(" ", "-"))]
    return parse_settings("", flags)


def train(world, name: str, training: list[str], steps: int, out: Path) -> Iterator[tuple[float, float]]:
    """Train from the beginning. Yield seconds and mean loss of each step. Collective.

    out: the folder for the run folder, which holds only its lock.
    """
    settings = settings_of(name, training, steps, out)
    with RunLock(world) as lock, ClosedTogether() as resources:
        loop = assemble(settings, world, lock, resources)
        with closing(loop.tracer), loop.checkpoints:
            for step in loop.steps:
                yield make_step(loop, step)
            for _ in loop.model.ranges():  # waits for parameters that are still being gathered
                pass


def make_step(loop, step: int) -> tuple[float, float]:
    """Make a step like scripts/train.py. Return this rank's seconds from meeting to meeting, and the mean loss."""
    tracer = loop.tracer
    strategy = loop.strategy
    with tracer.step(step):
        loss_part = loop.worker.forward_backward(step, strategy.gradients_final)
        norm = strategy.update(loop.learning_rate.at(step))
        with tracer.phase("wait"):
            reports = loop.meeting_point.meet(loss_part, None if strategy.clipping.skips else norm)
    return tracer.seconds("step"), reports.loss
