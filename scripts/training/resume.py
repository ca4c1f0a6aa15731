"""Going on from a checkpoint: which one, whether it is of this run, and its state into the strategy."""

import sys
from pathlib import Path

import numpy as np

from dist.world import end_with_one_line
from gpt2.errors import UserError
from gpt2.formats.checkpoints import Checkpoint, newest_first
from scripts.training.checkpointing import errors_name, is_on_gpu, state_arrays


def find_checkpoint(world, folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run's checkpoints folder, every byte checked; None where there is none. Collective.

    A damaged one is named and passed over. If all are, the job ends: to begin anew would be no resuming.
    """
    paths = world.comm.bcast(newest_first(folder) if world.rank == 0 else None)
    for path in paths:
        checkpoint, problem = _checked(world, path)
        if problem is None:
            return checkpoint
        if world.rank == 0:
            print(f"{problem}; trying the one before", file=sys.stderr, flush=True)
    if paths:
        text = f"{folder}: none of its {len(paths)} checkpoints can be read: choose another --out"
        end_with_one_line(world.comm, text)
    return None


def _checked(world, path: Path) -> tuple[Checkpoint | None, str | None]:
    """A checkpoint, and what is wrong with it on any rank, or None; each rank reads a part of it."""
    checkpoint = problem = None
    try:
        checkpoint = Checkpoint(path)
        checkpoint.check(world.rank, world.size)
    except UserError as error:
        problem = f"{error} (rank {world.rank} on {world.host})"
    return checkpoint, next((each for each in world.comm.allgather(problem) if each is not None), None)


def check_same_run(checkpoint: Checkpoint, facts: dict) -> None:
    """UserError where a checkpoint's facts differ from those of the run that is to go on from it."""
    flags = {
        "model": "--model, or what shapes it", "global_batch": "--batch-size times --grad-accum times the ranks",
        "seq_len": "--seq-len", "shuffle": "--shuffle", "seed": "--seed", "data": "the training data",
    }  # fmt: skip
    for name, flag in flags.items():
        found, wanted = checkpoint.facts.get(name), facts[name]
        if found != wanted and not (name == "seed" and not facts["shuffle"]):
            raise UserError(
                f"{checkpoint.path}: its {name} is {found}, this run's {wanted}: a run goes on with the same; change "
                f"{flag}, or choose another --out"
            )


def restore(checkpoint: Checkpoint, strategy, facts: dict, world) -> None:
    """Fill the optimizer state of what the strategy updates, whose parameters are there already. Collective."""
    with world.together(UserError):
        for array, start, values in state_arrays(strategy):
            if array != "parameters" and len(values):
                _fill(values, checkpoint, array, start)
        strategy.clipping.norms.extend(checkpoint.facts["norms"])
        for updated in strategy.state():
            updated.optimizer.step = checkpoint.facts["updates"]
        _restore_errors(checkpoint, strategy, facts, world)
    strategy.resumed()


def _fill(values, checkpoint: Checkpoint, array: str, start: int) -> None:
    """values (n,) float32, in host memory or on a GPU, from element `start` of an array of a checkpoint."""
    host = np.empty(len(values), np.float32) if is_on_gpu(values) else values
    checkpoint.read(array, start, host)
    if is_on_gpu(values):
        values.set(host)


def _restore_errors(checkpoint: Checkpoint, strategy, facts: dict, world) -> None:
    """Error feedback goes on where the same ranks exchange in the same way, and begins at 0 elsewhere."""
    errors, name = strategy.errors(), errors_name(world.rank)
    if errors is None or not checkpoint.holds(name):
        return
    if all(checkpoint.facts.get(fact) == facts[fact] for fact in ("ranks", "strategy")):
        _fill(errors, checkpoint, name, 0)
    else:
        world.print("error feedback begins anew: the checkpoint's is that of other ranks or another strategy")
