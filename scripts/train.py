"""Train a GPT-2 under MPI, with data, tensor and pipeline parallelism.

mpirun -n 4 python scripts/train.py                                  a minute on a laptop: six plays, a small model
mpirun -n 4 python scripts/train.py --strategy sliced --text my.txt --out runs/sliced
srun -n 8 python scripts/train.py --strategy hierarchical-sharded --model gpt2-124M --train-data '...'
mpirun -n 8 python scripts/train.py --tensor-parallel 2 --pipeline-parallel 2 --grad-accum 8
python scripts/train.py --restarts 5 --launcher "mpirun -n 4" --out RUN       starts the ranks, and restarts them

Exit codes: 0 all steps or --minutes are done; 75 SIGTERM or SIGUSR2 and 130 Ctrl-C, both after a checkpoint from which
--resume continues; 2 invalid input or a disk error, one line. A second Ctrl-C ends the job at once.
"""

import sys

from scripts.training.signals import CHECKPOINT, EXIT_CODES, TIME_IS_UP, let_wait

if __name__ == "__main__":
    let_wait()  # the imports below take a second, and a signal that asks for a checkpoint must not end the job there

from contextlib import closing

from dist.console import open_console
from dist.probe.programs import RANKS, is_first
from dist.world import ClosedTogether, end_without_mpi, start_world
from gpt2.errors import UserError
from scripts.settings.checks import check_numbers
from scripts.settings.training import parse_settings
from scripts.training.assemble import assemble
from scripts.training.meeting import end_if_diverged
from scripts.training.restarts import supervise
from scripts.training.run_lock import RunLock


def main():
    settings = parse_settings(__doc__)
    if settings.restarts:
        sys.exit(supervised(settings))
    sys.exit(train(settings, start_world(settings.expect_ranks, (UserError,))))


def supervised(settings) -> int:
    """--restarts: this process starts the ranks. Returns the exit code."""
    try:
        check_numbers(settings)
    except UserError as error:
        end_without_mpi(str(error), is_first(RANKS))
    given = settings.launcher, settings.out, settings.restart_after, settings.minutes
    return supervise(settings.restarts, *given, sys.argv[1:])


def train(settings, world) -> int:
    """Train in a run folder that is this run's alone. Returns the exit code. Collective."""
    with RunLock(world, supervisor=settings.supervisor or "") as lock, ClosedTogether() as resources:
        parts = assemble(settings, world, lock, resources)
        return 0 if parts is None else make_steps(parts, world)


def make_steps(parts, world) -> int:
    """The training loop. Every rank runs it; how gradients become updated parameters is the strategy's business.

    Returns 0 if all steps have been made, else the exit code of who asked for the end.
    """
    worker, strategy, tracer, checkpoints = parts.worker, parts.strategy, parts.tracer, parts.checkpoints
    world.print(parts.table)
    step = parts.steps.start - 1
    with closing(tracer), checkpoints:
        for step in parts.steps:
            lr = parts.learning_rate.at(step)
            with tracer.step(step):
                loss_part = worker.gradients(step, strategy.gradients_final)
                norm = strategy.update(lr)
                with tracer.phase("wait"):  # for the slowest rank; from here on all know the same, and do the same
                    meeting = parts.meeting_point.meet(loss_part, None if strategy.clipping.skips else norm)
            if step == parts.steps.start:
                fill_folder(parts, world)
            record = parts.records.of_step(step, meeting, norm, lr, tracer.seconds("step"), strategy.clipping.skips)
            record |= parts.validation.after(step)
            if world.rank == 0:  # before what may end the run, so that the log holds the step that ended it
                parts.folder.log(record)
                parts.progress.step(record, meeting.compute_s)
            checkpoints.end_if_not_finite(meeting.written)
            end_if_diverged(world, step, meeting, record.get("val_loss", 0.0))
            parts.replicas.after(step, checkpoints.has(step, meeting.asked))
            parts.gpu_choices.after(step, checkpoints.has(step, meeting.asked), checkpoints, parts.folder)
            parts.samples.after(step)
            if checkpoints.is_due(step, meeting.asked):
                with tracer.phase("checkpoint"):
                    checkpoints.begin(step)
            if meeting.asked > CHECKPOINT:
                break
    is_done = step >= parts.steps.stop - 1
    checkpoints.leave_last(step, parts.model if is_done else None)
    why = None if is_done else "--minutes" if meeting.asked == TIME_IS_UP else "a signal"
    parts.ending.tell(step, why, checkpoints.costs)
    return 0 if is_done else EXIT_CODES[meeting.asked]


def fill_folder(parts, world) -> None:
    """Make the run folder this start's, now that it has made a step. Collective."""
    with world.together(UserError):
        if world.rank == 0:
            parts.folder.begin()
    parts.tracer.begin()


if __name__ == "__main__":
    open_console()
    main()
