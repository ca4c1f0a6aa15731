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

from scripts.training.signals import CHECKPOINT, ENDED_BY, EXIT_CODES, let_wait

if __name__ == "__main__":
    let_wait()  # the imports below take a second; a signal that requests a checkpoint must not end the job meanwhile

from contextlib import closing

from dist.console import open_console
from dist.probe.programs import RANKS, is_first
from dist.world import ClosedTogether, end_without_mpi, start_world
from gpt2.errors import UserError
from scripts.settings.checks import check_numbers
from scripts.settings.training import parse_settings
from scripts.training.assemble import assemble
from scripts.training.between_steps import MadeStep
from scripts.training.restarts import supervise
from scripts.training.run_lock import RunLock


def main():
    settings = parse_settings(__doc__)
    if not settings.restarts:
        sys.exit(train(settings, start_world(settings.expect_ranks, (UserError,))))
    try:
        check_numbers(settings)
    except UserError as error:
        end_without_mpi(str(error), is_first(RANKS))
    limits = settings.restart_after, settings.minutes
    sys.exit(supervise(settings.restarts, settings.launcher, settings.out, *limits, sys.argv[1:]))


def train(settings, world) -> int:
    """Train in a run folder, behind its lock. Return the exit code. Collective."""
    with RunLock(world, supervisor=settings.supervisor or "") as lock, ClosedTogether() as resources:
        loop = assemble(settings, world, lock, resources)
        return 0 if loop is None else make_steps(loop, world)


def make_steps(loop, world) -> int:
    """Run the training loop on every rank; the strategy decides how gradients become updated parameters.

    After each step the hooks validate, log, end the job if it diverged, sample and begin a checkpoint, each when it is
    due (scripts/training/assemble.py). Return 0 if all steps are made, else the exit code of the request to end.
    """
    world.print(loop.table)
    strategy = loop.strategy
    tracer = loop.tracer
    checkpoints = loop.checkpoints
    with closing(tracer), checkpoints:
        for step in loop.steps:
            lr = loop.learning_rate.at(step)
            with tracer.step(step):
                loss_part = loop.worker.forward_backward(step, strategy.gradients_final)
                norm = strategy.update(lr)
                skipped = strategy.clipping.skips
                # All ranks get the same reports. With some strategies only rank 0, which logs, knows norm and skipped.
                with tracer.phase("wait"):
                    reports = loop.meeting_point.meet(loss_part, None if skipped else norm)
            record = loop.records.of_step(step, reports, norm, lr, tracer.seconds("step"), skipped)
            made = MadeStep(step, reports, record, checkpoints.has(step, reports.request))
            for after_step in loop.hooks:
                after_step(made)
            if reports.request > CHECKPOINT:
                break
    is_done = step == loop.steps[-1]
    checkpoints.leave_last(step, loop.model if is_done else None)
    loop.end_run(step, None if is_done else ENDED_BY[reports.request], checkpoints.costs)
    return 0 if is_done else EXIT_CODES[reports.request]


if __name__ == "__main__":
    open_console()
    main()
