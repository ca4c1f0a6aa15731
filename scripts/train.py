"""Train a GPT-2 data-parallel under MPI.

mpirun -n 4 python scripts/train.py                                  a minute on a laptop: embedded corpus, small model
mpirun -n 4 python scripts/train.py --strategy sliced --text my.txt --out runs/sliced
srun -n 8 python scripts/train.py --model gpt2-124M --train-data 'fineweb/*_train_*.bin' --val-data 'fineweb/*_val_*'

Exit codes: 0 all steps are done; 75 a SIGTERM ended it after a checkpoint, --resume goes on; 2 a mistake, one line.
"""

from contextlib import closing

from dist.world import start_world
from gpt2.errors import UserError
from scripts.settings.training import complete, parse_settings
from scripts.training.end import finish
from scripts.training.facts import run_facts
from scripts.training.report import Progress, settings_table, slowest
from scripts.training.run import TrainingRun
from scripts.training.samples import TrainingSamples
from scripts.training.signals import END, INTERRUPTED


def main():
    settings = parse_settings(__doc__)
    if not train(settings, start_world(settings.expect_ranks, (UserError,))):
        raise SystemExit(INTERRUPTED)


def train(settings, world) -> bool:
    """The training loop; every rank runs it, and what a strategy does with the gradients is its own business. A rank
    that computes none, as a dedicated server, has no worker.

    Returns whether all steps have been made.
    """
    with world.together(UserError):
        settings, config = complete(settings, world.size)
    run = TrainingRun(settings, config, world)
    settings = run.settings
    tracer, strategy, worker = run.tracer, run.strategy, run.worker
    samples = TrainingSamples(run, settings.sample_every)
    progress = Progress(settings.steps, world.print, world.places)
    world.print(settings_table(settings, run_facts(run)))
    step = run.steps.start - 1
    with closing(tracer):
        for step in run.steps:
            lr = run.schedule.at(step)
            with tracer.step(step):
                loss_part = worker.gradients(step, strategy.gradients_final) if worker else 0.0
                norm = strategy.update(lr)
                with tracer.phase("wait"):  # for the slowest rank; from here on all know the same
                    meeting = run.meet(loss_part)
            record = run.record(step, meeting, norm, lr) | slowest(meeting.compute_s)
            if run.validates_after(step):
                record["val_loss"] = run.validation_loss()
            if world.rank == 0:
                run.folder.log(record)
                progress.step(record, meeting.compute_s)
            run.end_if_diverged(step, meeting.loss)
            run.end_if_drifted(step)
            samples.after(step)
            if run.leaves_checkpoint(step, meeting):
                with tracer.phase("checkpoint"):
                    run.begin_checkpoint(step)
            if meeting.asked == END:
                break
    return finish(run, step)


if __name__ == "__main__":
    main()
