"""Train a GPT-2 data-parallel under MPI.

mpirun -n 4 python scripts/train.py                                  a minute on a laptop: embedded corpus, small model
mpirun -n 4 python scripts/train.py --strategy sliced --text my.txt --out runs/sliced
srun -n 8 python scripts/train.py --model gpt2-124M --train-data 'fineweb/*_train_*.bin' --val-data 'fineweb/*_val_*'
"""

from contextlib import closing

import mpi4py

mpi4py.rc(initialize=False, finalize=True)  # MPI starts in start_world: --help answers where it cannot start

from report import Progress, settings_table, slowest
from run_facts import run_facts
from train_settings import complete, parse_settings
from training_run import TrainingRun

from dist.world import start_world
from gpt2.errors import UserError


def main():
    settings = parse_settings(__doc__)
    train(settings, start_world(settings.expect_ranks))


def train(settings, world):
    """The training loop; every rank runs it, and what a strategy does with the gradients is its own business."""
    with world.together(UserError):
        settings, config = complete(settings, world.size)
    run = TrainingRun(settings, config, world)
    settings = run.settings
    tracer, strategy, worker = run.tracer, run.strategy, run.worker
    progress = Progress(settings.steps, world.print, world.places)
    world.print(settings_table(settings, run_facts(run)))
    with closing(tracer):
        for step in range(1, settings.steps + 1):
            lr = run.schedule.at(step)
            with tracer.step(step):
                loss_part = worker.gradients(step, strategy.gradients_final) if worker else 0.0
                norm = strategy.update(lr)
                with tracer.phase("wait"):
                    loss, exposed_s, compute_s = run.meet(loss_part)
            record = run.record(step, loss, norm, lr, exposed_s) | slowest(compute_s)
            if run.validates_after(step):
                record["val_loss"] = run.validation_loss()
            if world.rank == 0:
                run.folder.log(record)
                progress.step(record, compute_s)
            run.end_if_diverged(step, loss)
    run.finish()


if __name__ == "__main__":
    main()
