"""What a run starts from: random parameters, those of a file, or the whole state that a checkpoint of the run holds."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from dist.console import say
from dist.world import end_with_one_line
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.formats.checkpoints import CUT, Checkpoint, newest_first
from gpt2.parameters import Parameters, initialize
from scripts.settings.sequence_length import untrained_positions
from scripts.training.changes import changed_settings
from scripts.training.folder import confirm_summary
from scripts.training.report import warn
from scripts.training.same_files import check_same_files, found_for_all
from scripts.training.state import errors_name, is_errors_name, is_on_gpu, state_arrays


def fill_parameters(
    parameters: Parameters, buffers, checkpoint: Checkpoint | None, init: str | Path, seed: int
) -> None:
    """Fill the parameters, in host memory, from a checkpoint, from a file or a run (init), or at random.

    buffers: a strategy's, which take each range up as soon as it is filled (buffers.filled). UserError: the file does
    not fit, or is damaged.
    """
    if not buffers.fills_parameters:
        pass  # the node's ranks share one copy, and another rank fills it
    elif checkpoint:
        checkpoint.read_parameters(parameters, buffers.filled)
    elif init == "random":
        initialize(parameters, seed, buffers.filled)
    else:
        weights.read_parameters(init, parameters, buffers.filled)


def first_parameters(
    init: str, seed: int, seq_len: int, backend, layout, checkpoint: Checkpoint | None, world
) -> Parameters:
    """The parameters in host memory, filled, also where the strategy and the model have theirs. Collective.

    Rank 0 warns if the file of --init has untrained positions that sequences of seq_len tokens use.
    """
    parameters = Parameters(layout, backend.host_parameters)
    if init != "random" and not checkpoint:
        init = found_for_all(world, Path(init))
        with world.together(UserError):
            files = weights.files(init)
            untrained = untrained_positions(init, seq_len)
        if world.rank == 0 and untrained:
            warn(untrained)
        check_same_files(world, files)
    with world.together(UserError):
        fill_parameters(parameters, backend.buffers, checkpoint, init, seed)
    return parameters


def find_checkpoint(world, folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run's checkpoints folder, with every byte checked; None if there is none. Collective.

    A damaged one is named and passed over. If all are damaged, the job ends: --resume must not begin anew unasked.
    """
    paths = world.comm.bcast(newest_first(folder) if world.rank == 0 else None)
    for path in paths:
        checkpoint = own_problem = None
        try:
            checkpoint = Checkpoint(path)
            checkpoint.check(world.rank, world.size)  # a part of it; all learn what any of them found
        except UserError as error:
            own_problem = f"{error} (rank {world.rank} on {world.host})"
        problem = next((each for each in world.comm.allgather(own_problem) if each is not None), None)
        if problem is None:
            return checkpoint
        if world.rank == 0:
            say(f"{problem}; trying the one before", on_stderr=True)
    if paths:
        text = f"{folder}: none of its {len(paths)} checkpoints can be read: choose another --out"
        end_with_one_line(world.comm, text)
    return None


def chosen_before(world, folder: Path) -> dict | None:
    """What --strategy auto chose for the run with this checkpoints folder, by its newest checkpoint; None if it did not
    choose. Collective. The choice comes before the run folder is locked, and all checkpoints of a run say the same.
    """
    chosen = None
    if world.rank == 0:
        for path in newest_first(folder):
            with suppress(UserError):  # damaged: find_checkpoint says so
                chosen = Checkpoint(path).facts["auto"]
                break
    return world.comm.bcast(chosen)


def find_and_check(world, out: Path, facts: dict, typed, steps: int) -> Checkpoint | None:
    """The newest checkpoint of a run folder, which is to be of the run that goes on; rank 0 says where it begins.

    facts: of the run that goes on; typed: which settings stand in its command; steps: how many it is to have.
    Collective. Ends the job with one line where it is another run.
    """
    checkpoint, changes = find_checkpoint(world, out / "checkpoints"), ""
    is_done = checkpoint is not None and checkpoint.step >= steps
    with world.together(UserError):
        if checkpoint:
            check_same_run(checkpoint, facts)
            if world.rank == 0:
                changes = changed_settings(checkpoint, facts["settings"], typed, steps)
                if is_done:
                    confirm_summary(out)
    if is_done:
        world.print(f"{out} has made {checkpoint.step} steps of {steps}: nothing is left to do; --steps makes more")
        return checkpoint
    begins = f"goes on from step {checkpoint.step}" if checkpoint else "holds no checkpoint: the run begins"
    world.print(f"{out} {begins}{changes and f'; {changes}'}")
    return checkpoint


def check_same_run(checkpoint: Checkpoint, facts: dict) -> None:
    """UserError if a checkpoint is of another run than the one of these facts, which is to go on from it."""
    flags = {
        "model": "--model, or what shapes it",
        "global_batch": "--batch-size times --grad-accum times the ranks, or the model's copies where ranks share one",
        "seq_len": "--seq-len", "shuffle": "--shuffle", "seed": "--seed",
        "data": "the training data",
    }  # fmt: skip
    for name, flag in flags.items():
        found, wanted = checkpoint.facts[name], facts[name]
        if found != wanted and not (name == "seed" and not facts["shuffle"]):
            raise UserError(
                f"{checkpoint.path}: its {name} is {found}, this run's {wanted}: a run goes on with the same; change "
                f"{flag}, or choose another --out"
            )


def exchanges_alike(checkpoint: Checkpoint, facts: dict) -> bool:
    """Whether the run of these facts adds the same gradients in the same order as the one that left the checkpoint."""
    names = "ranks", "strategy", CUT
    return all(checkpoint.facts.get(name) == facts.get(name) for name in names)


def kept_facts(checkpoint: Checkpoint | None, facts: dict) -> dict:
    """The checkpoint's facts, by which the exchange goes on as it was; none where it may be another."""
    return checkpoint.facts if checkpoint and exchanges_alike(checkpoint, facts) else {}


def restore(checkpoint: Checkpoint, strategy, layout, facts: dict, world, mesh=None) -> None:
    """Fill the optimizer state of what the strategy updates. Its parameters are there already. Collective.

    layout: of what this rank holds. facts: those of the run that goes on (Plan.identity). mesh: as
    state.py's.
    """
    with world.together(UserError):
        for array, start, values in state_arrays(strategy):
            if array != "parameters" and len(values):
                _fill(values, checkpoint, array, start, layout)
        strategy.clipping.remember(checkpoint.facts["norms"])
        for updated in strategy.state():
            updated.optimizer.step = checkpoint.facts["updates"]
        errors, name = strategy.errors(), errors_name(world.rank, mesh)
        if errors is not None:
            # Error feedback goes on if the same ranks exchange in the same way as before; else it begins at 0.
            if exchanges_alike(checkpoint, facts):
                if name in checkpoint.arrays:
                    _fill(errors, checkpoint, name, 0, layout)
            elif any(map(is_errors_name, checkpoint.arrays)):
                world.print("error feedback begins anew: the checkpoint's is that of other ranks or another strategy")
    strategy.resumed()


def _fill(values, checkpoint: Checkpoint, array: str, start: int, layout) -> None:
    """Fill values (n,) float32, in host memory or on a GPU, from element `start` on of a checkpoint's array."""
    host = np.empty(len(values), np.float32) if is_on_gpu(values) else values
    checkpoint.read(array, start, host, layout)
    if is_on_gpu(values):
        values.set(host)
