"""The initial state of a run: random parameters, parameters from a file, or a checkpoint of the run."""

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
from scripts.training.state import errors_name, state_arrays


def first_parameters(
    init: str, seed: int, seq_len: int, backend, layout, checkpoint: Checkpoint | None, world
) -> Parameters:
    """Fill the parameters of backend, strategy and model: from a checkpoint, from a file or run, or at random.

    Return the parameters in host memory. Collective. init: --init. The backend's buffers process each range as soon as
    it is filled. Rank 0 warns if sequences of seq_len tokens use positions that are untrained in the file. End the job
    if the file is damaged or belongs to a model of another shape.
    """
    parameters = Parameters(layout, backend.host_parameters)
    buffers = backend.buffers
    if init != "random" and not checkpoint:
        init = found_for_all(world, Path(init))
        with world.together(UserError):
            files = weights.files(init)
            untrained = untrained_positions(init, seq_len)
        if world.rank == 0 and untrained:
            warn(untrained)
        check_same_files(world, files)
    with world.together(UserError):
        if not buffers.fills_parameters:
            pass  # ranks of the node share parameters, and another rank fills them
        elif checkpoint:
            checkpoint.read_parameters(parameters, buffers.filled)
        elif init == "random":
            initialize(parameters, seed, buffers.filled)
        else:
            weights.read_parameters(init, parameters, buffers.filled)
    return parameters


def find_checkpoint(world, folder: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint of a checkpoints folder, every byte checked, or None. Collective.

    Name damaged checkpoints and skip them. If all are damaged, end the job: --resume must not silently begin again.
    """
    paths = world.comm.bcast(newest_first(folder) if world.rank == 0 else None)
    for path in paths:
        checkpoint = own_problem = None
        try:
            checkpoint = Checkpoint(path)
            checkpoint.check(world.rank, world.size)  # each rank checks a part, and all ranks get the results
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
    """Return the choice of --strategy auto in the newest checkpoint of this folder, or None. Collective.

    The choice is read before the run folder is locked. That is safe: all checkpoints of a run hold the same choice.
    """
    chosen = None
    if world.rank == 0:
        for path in newest_first(folder):
            with suppress(UserError):  # find_checkpoint names damaged ones
                chosen = Checkpoint(path).facts["auto"]
                break
    return world.comm.bcast(chosen)


def find_and_check(world, out: Path, facts: dict, typed, steps: int) -> Checkpoint | None:
    """Return the newest checkpoint of a run folder. Rank 0 prints the step from which the run resumes. Collective.

    facts: the identity of the run (Plan.identity). typed: the names of the flags on its command line. steps: of the
    whole run. End the job with one line if the checkpoint belongs to another run.
    """
    checkpoint = find_checkpoint(world, out / "checkpoints")
    text = "has no checkpoint: starting a new run"
    with world.together(UserError):
        if checkpoint:
            check_same_run(checkpoint, facts)
            changes = changed_settings(checkpoint, facts["settings"], typed, steps)
            text = f"continues from step {checkpoint.step}{changes and f'; {changes}'}"
            if checkpoint.step >= steps:
                text = f"has made {checkpoint.step} steps of {steps}: nothing is left to do; --steps makes more"
                if world.rank == 0:
                    confirm_summary(out)
    world.print(f"{out} {text}")
    return checkpoint


def check_same_run(checkpoint: Checkpoint, facts: dict) -> None:
    """Raise UserError if a checkpoint belongs to another run than the one with these facts."""
    flags = {
        "model": "--model, or what shapes it",
        "global_batch": "--batch-size times --grad-accum times the ranks, or times the replicas if ranks share a model",
        "seq_len": "--seq-len", "shuffle": "--shuffle", "seed": "--seed",
        "data": "the training data",
    }  # fmt: skip
    for name, flag in flags.items():
        found = checkpoint.facts.get(name)
        wanted = facts[name]
        if found != wanted and not (name == "seed" and not facts["shuffle"]):
            raise UserError(
                f"{checkpoint.path}: its {name} is {found}, this run's {wanted}, expected the same: change {flag}, or "
                "choose another --out"
            )


def exchanges_alike(checkpoint: Checkpoint, facts: dict) -> bool:
    """Return whether a run with these facts adds the same gradients in the same order as the checkpoint's run."""
    return all(checkpoint.facts.get(name) == facts.get(name) for name in ("ranks", "strategy", CUT))


def restore(checkpoint: Checkpoint, strategy, layout, facts: dict, world, mesh=None) -> None:
    """Restore the optimizer state of this rank's part. The parameters are filled already. Collective.

    layout: of this rank's model shard. facts: the identity of the run (Plan.identity). mesh: see state.py.
    """
    with world.together(UserError):
        for array, start, values in state_arrays(strategy):
            if array != "parameters" and len(values):
                _fill(values, checkpoint, array, start, layout)
        strategy.clipping.remember(checkpoint.facts["norms"])
        for updated in strategy.state():
            updated.optimizer.step = checkpoint.facts["updates"]
        missing = []
        for name, start, values in strategy.own_arrays():
            if name in checkpoint.arrays:
                _fill(values, checkpoint, name, start, layout)
            else:
                missing.append(name)
        if missing:
            world.print(f"the checkpoint, of other ranks or another strategy, has no {missing[0]}: it begins anew")
        errors = strategy.errors()
        name = errors_name(world.rank, mesh)
        if errors is not None:
            # Error feedback continues if the same ranks exchange in the same way; else it begins at 0.
            if exchanges_alike(checkpoint, facts) and not missing:
                if name in checkpoint.arrays:
                    _fill(errors, checkpoint, name, 0, layout)
            elif any("errors_" in array for array in checkpoint.arrays):
                world.print("error feedback begins anew: the checkpoint's belongs to other ranks or another strategy")
    strategy.resumed()


def _fill(values, checkpoint: Checkpoint, array: str, start: int, layout) -> None:
    """Fill values (n,) float32, in host memory or on a GPU, from a checkpoint's array, beginning at element `start`."""
    is_on_gpu = hasattr(values, "set")
    host = np.empty(len(values), np.float32) if is_on_gpu else values
    checkpoint.read(array, start, host, layout)
    if is_on_gpu:
        values.set(host)
