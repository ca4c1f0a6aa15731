"""Hooks that the training loop calls after each step: validation, log, comparison of replicas, samples, checkpoints.

Each hook gets a MadeStep. All of them are collective: every rank calls each of them after every step.
"""

import math
import zlib
from dataclasses import dataclass
from functools import partial

from dist.sharded import Slots
from dist.waiting import barrier, sum_everywhere
from dist.world import end_with_one_line
from gpt2.errors import UserError
from gpt2.inference.cached_model import CachedGPT2
from gpt2.inference.generated_text import Sampling, document_start, printable, sample_text
from gpt2.kernels import load_kernels
from gpt2.parameters import Parameters
from scripts.settings.memory import check_parameters
from scripts.settings.tokenizer import choose_tokenizer
from scripts.training.meeting import RankReports
from scripts.training.state import shares_model
from scripts.training.whole_model import WholeModel

SAMPLE_TOKENS = 100


@dataclass(frozen=True)
class MadeStep:
    """A step that all ranks have made."""

    number: int  # counted from 1
    reports: RankReports
    record: dict  # on rank 0 the line of log.jsonl; hooks may add to it
    is_saved: bool = False  # whether this step gets a checkpoint


def is_time(step: int, every: int) -> bool:
    """Return whether a task that runs every `every` steps is due after this step. every: 0 for never."""
    return every > 0 and step % every == 0


def begin_folder(world, folder, tracer, first_step: int, step: MadeStep) -> None:
    """Begin to write the run folder, after the first step of this start. folder: rank 0's RunFolder."""
    if step.number != first_step:
        return
    with world.together(UserError):
        if world.rank == 0:
            folder.begin()
    tracer.begin()


def log_step(folder, progress, step: MadeStep) -> None:
    """Write the line of log.jsonl on rank 0, which alone has a folder, and print the progress line."""
    if folder is not None:
        folder.log(step.record)
        progress.step(step.record, step.reports.compute_s)


def end_if_diverged(world, checkpoints, step: MadeStep) -> None:
    """End the job if this step's loss, gradient norm, validation loss or the state to be checkpointed is not finite.

    All ranks have the same numbers, so all of them end. The norm of a skipped step does not count.
    """
    checkpoints.end_if_not_finite(step.reports.written)
    found = {
        "loss": step.reports.losses,
        "gradients' norm": step.reports.norms,
        "validation loss": [step.record.get("val_loss", 0.0)],
    }
    for what, parts in found.items():
        if not math.isfinite(sum(parts)):
            rank, number = next((rank, part) for rank, part in enumerate(parts) if not math.isfinite(part))
            # Name a rank only if other ranks have finite numbers. A 0 means that a rank has no number.
            is_alone = any(part and math.isfinite(part) for part in parts)
            whose = f" (rank {rank} on {world.places[rank]['host']})" if is_alone else ""
            text = f"the {what} of step {step.number} is {number}{whose}: lower --lr, raise --warmup, or check the data"
            end_with_one_line(world.comm, text)


def begin_checkpoint(checkpoints, tracer, step: MadeStep) -> None:
    """Begin a checkpoint if one is due; Checkpointing.leave_last writes the last one."""
    if step.is_saved and not checkpoints.is_last(step.number, step.reports.request):
        with tracer.phase("checkpoint"):
            checkpoints.begin(step.number)


def validate(comm, tracer, worker, every: int, last_step: int, batches: int, evaluated, step: MadeStep) -> None:
    """Add "val_loss" to the step's record if a validation is due: the mean over the first validation windows.

    every: in steps, 0 for no validation. last_step: always validated. batches: see Worker.validation_loss. evaluated:
    of the strategy.
    """
    if not is_time(step.number, every) and not (every and step.number == last_step):
        return
    with tracer.phase("eval"), evaluated():
        part = worker.validation_loss(batches, tracer.moves_on)
    with tracer.phase("wait"):
        loss, tokens = sum_everywhere(comm, *part)
    step.record["val_loss"] = loss / tokens


class Samples:
    """--sample-every: rank 0 prints text from the model, reading sequences as long as in training.

    If rank 0 computes with all parameters, it samples with the same kernels. Otherwise (ZeRO-3, ranks that share a
    model) it copies the parameters to host memory range by range, and samples on its cores. The constructor ends the
    job if no tokenizer fits the vocabulary, or if there is no memory for the copy.
    """

    def __init__(
        self, world, tracer, model: WholeModel, backend, every: int, tokenizer: str | None, threads: int, seed: int,
        sequence_length: int,
    ):  # fmt: skip
        self.world = world
        self.tracer = tracer
        self.model = model
        self.every = every
        self.seed = seed
        self._copies = model.shared or isinstance(backend.model.parameters, Slots)
        with world.together(UserError):
            if every and world.rank == 0:
                config = model.parameters.layout.config
                self._encoding = choose_tokenizer(tokenizer, None, config.vocab_size)
                length = min(sequence_length, len(document_start(self._encoding)) + SAMPLE_TOKENS)
                if self._copies:
                    check_parameters("--sample-every", config)
                    self._new_writer = partial(CachedGPT2, load_kernels("numpy", threads), sequence_length=length)
                else:
                    own = Parameters(model.held.layout, backend.model.parameters)
                    self._writer = CachedGPT2(backend.kernels, own, length)

    def after(self, step: MadeStep) -> None:
        """Print a sample if one is due. All ranks bring their ranges and wait for rank 0."""
        if not is_time(step.number, self.every):
            return
        with self.tracer.phase("eval"), self.model.evaluated():
            if self._copies:
                parameters = self._gathered()
            else:
                self.model.bring_all()
            if self.world.rank == 0:
                writer = self._new_writer(parameters) if self._copies else self._writer
                seed = self.seed, step.number
                pieces = []
                for piece in sample_text(writer, self._encoding, "", SAMPLE_TOKENS, Sampling(), seed):
                    pieces.append(piece)
                    self.tracer.moves_on()
                self.world.print(f"sample after step {step.number}: {printable(''.join(pieces))}")
        with self.tracer.phase("wait"):
            barrier(self.world.comm)  # ranks of a node may share parameters: nobody changes them while rank 0 reads

    def _gathered(self) -> Parameters | None:
        """Return a copy of all parameters on rank 0, None elsewhere. Collective."""
        parameters = self.model.parameters
        copy = Parameters.zeros(parameters.layout) if self.world.rank == 0 else None
        for start, stop in self.model.ranges():
            if copy:
                copy.flat[start:stop] = parameters.flat[start:stop]
        return copy


def check_replicas(world, model: WholeModel, every: int, holds: bool, mesh, step: MadeStep) -> None:
    """--check-replicas: end the job if replicas' parameters differ, as after a memory or network fault.

    Replicas are compared every `every` steps (0: never) and before each checkpoint. The line names the ranks that
    differ from most others. holds: whether this rank compares its parameters; ranks of a node may share one copy. mesh:
    see state.py.
    """
    if not is_time(step.number, every) and not (every and step.is_saved):
        return
    own = (mesh.stage, mesh.shard) if shares_model(mesh) else None
    checksum = 0
    with model.evaluated():
        for start, stop in model.held_ranges():
            checksum = zlib.crc32(model.held.flat[start:stop], checksum)
    told = world.comm.allgather((own, checksum if holds else None))
    found = []
    for shard in dict.fromkeys(shard for shard, _ in told):
        alike = [rank for rank, (theirs, _) in enumerate(told) if theirs == shard]
        found.append(who_differs([told[rank][1] for rank in alike], [world.places[rank] for rank in alike]))
    if words := "; ".join(filter(None, found)):
        end_with_one_line(world.comm, f"after step {step.number} {words}: use --resume on other nodes")


def who_differs(checksums: list[int | None], places: list[dict]) -> str | None:
    """Name the ranks whose parameters differ from those of most ranks; None if all are the same.

    checksums: one per rank, None if the rank shares another rank's parameters. Without a majority, as with two ranks,
    nobody can tell which parameters are wrong, so name all ranks.
    """
    holders = {}
    for place, checksum in zip(places, checksums, strict=True):
        if checksum is not None:
            holders.setdefault(checksum, []).append(f"rank {place['rank']} on {place['host']}")
    if len(holders) == 1:
        return None
    groups = sorted(holders.values(), key=len, reverse=True)
    usual, *others = (", ".join(group) for group in groups)
    if 2 * len(groups[0]) > sum(map(len, groups)):
        return f"these hold different parameters from the rest: {', '.join(others)}"
    return f"these hold different parameters, and nobody can tell which are right: {'; '.join([usual, *others])}"
