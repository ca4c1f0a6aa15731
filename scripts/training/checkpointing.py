"""Write checkpoints while the run goes on: each rank copies its part of the state, and a thread writes the copy.

At the start the ranks divide the writing: if several hold the same state, each writes a share of it. At the end of each
step all ranks report whether their parts are on disk. When all parts are, rank 0 completes the checkpoint.
"""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist.console import say
from dist.ranges import divide_among_holders
from dist.waiting import Condition, gather_everywhere, wait
from gpt2.errors import UserError, file_errors
from gpt2.formats import checkpoint_files, checkpoints, llmc, weights
from gpt2.parameters import Layout
from scripts.training.between_steps import is_time
from scripts.training.signals import CHECKPOINT
from scripts.training.state import errors_name, on_host, prefix_of, shares_model, state_arrays
from scripts.training.whole_model import WholeModel

FAILED = -1
NOT_FINITE = -2
ADVICE = "free some space, or check the disk"


class NotFiniteError(UserError):
    """The state has numbers that are not finite. It must not become a checkpoint: no run could resume from it."""

    def __init__(self, step: int, found: str):
        super().__init__(
            f"after step {step} there is {found}, expected finite numbers: lower --lr, or check this node's memory, "
            "and continue from the last checkpoint (--resume)"
        )


@dataclass
class Checkpointing(AbstractContextManager):
    """Writes checkpoints. Every rank has one; `begin`, `settle` and `leave_last` are collective.

    Ranks that hold the same model shard each write a share of it. costs: for each part that this rank wrote, the step,
    the bytes, the seconds for which training paused, and the seconds of writing.
    """

    world: object
    folder: Path  # RUN/checkpoints
    strategy: object
    layout: Layout  # of this rank's model shard
    run_facts: dict  # the facts of the run for each checkpoint (Plan.checkpoint_facts)
    steps: range  # the steps of this start
    every: int | None  # in steps; 0: only the last step; None: no checkpoints
    keep: tuple[int, int]  # (--keep, --keep-every): how many newest stay; steps whose multiples all stay, 0 for none
    check_lock: Callable[[], None]  # ends the job if another start has taken the run folder (RunLock.check)
    mesh: object = None  # see state.py

    def __post_init__(self):
        holders = self.mesh.data_world if shares_model(self.mesh) else self.world
        held = [(one.start, one.start + len(one.parameters)) for one in self.strategy.state()]
        self._parts = divide_among_holders(holders.comm.allgather(held), self.layout.count)[holders.rank]
        self._prefix = prefix_of(self.mesh)
        self._errors_name = errors_name(self.world.rank, self.mesh)
        self._room = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None  # this rank's part
        self._completing: Future | None = None  # rank 0 completes the checkpoint
        self._facts = None
        self.costs = []

    def __exit__(self, kind, *error) -> None:
        """If all ranks end with a one-line error, complete the checkpoint already begun: it is still valid."""
        if kind is SystemExit and self._facts is not None:
            self._settle_begun()
        if kind is SystemExit and self._completing is not None:
            self._completing.exception()  # waits until it is done

    def add_facts(self, facts: dict) -> None:
        """Add facts, the same on all ranks, to all further checkpoints."""
        self.run_facts = self.run_facts | facts

    def has(self, step: int, request: int) -> bool:
        """Return whether there will be a checkpoint of this step: it is time, one was requested, or the run ends."""
        wanted = request == CHECKPOINT or self.is_last(step, request) or is_time(step, self.every or 0)
        return self.every is not None and wanted

    def is_last(self, step: int, request: int) -> bool:
        """Return whether the run ends with this step; then `leave_last` writes its checkpoint."""
        return step == self.steps.stop - 1 or request > CHECKPOINT

    def begin(self, step: int, goes_on: bool = True) -> None:
        """Copy this rank's part of the state after this step, and begin to write the copy.

        If the previous checkpoint is not on disk yet, wait for it first. Without goes_on, nothing changes the state
        any more, so arrays in host memory need no copy.
        """
        begun = time.perf_counter()
        if self._facts is not None:
            self.end_if_not_finite(self._settle_begun())
        # checkpoint.json holds rank 0's number of updates: with every strategy rank 0 updates something in each step.
        updates = next((one.optimizer.step for one in self.strategy.state()), 0)
        norms = list(self.strategy.clipping.norms)
        position = {"step": step, "next_window": step * self.run_facts["global_batch"]}
        stays = {"milestone": is_time(step, self.keep[1])}
        self._facts = position | self.run_facts | {"updates": updates, "norms": norms} | stays
        try:
            copied = self._copied() if goes_on else [*self._pieces()]
        except MemoryError as error:
            self._writing = Future()
            self._writing.set_exception(error)
            return
        self._writing = self._thread.submit(self._write, step, copied, time.perf_counter() - begun)

    def _write(self, step: int, copied: list, stopped_s: float) -> int:
        begun = time.perf_counter()
        if found := checkpoints.not_finite(self.layout, copied):
            raise NotFiniteError(step, found)
        self._make_folder()
        run = self.run_facts["run"]
        size = checkpoint_files.write_part(self._part_folder(step), step, self.world.rank, copied, run)
        writing_s = time.perf_counter() - begun
        self.costs.append({"step": step, "bytes": size, "stopped_s": stopped_s, "writing_s": writing_s})
        return size

    def _make_folder(self) -> None:
        """Make checkpoints/ again if somebody has removed it, so that later checkpoints are kept."""
        try:
            self.folder.mkdir()
        except OSError:
            return  # it exists; or the run folder is missing too, and writing will report that
        self._complain(f"{self.folder} was gone, with its checkpoints: made again, for those from now on")

    def _part_folder(self, step: int) -> Path:
        return self.folder / f"{checkpoints.folder_name(step)}.part"

    def written(self) -> int:
        """Return the bytes of this rank's part on disk, 0 while the part is being written, FAILED or NOT_FINITE."""
        if self._writing is None or not self._writing.done():
            return 0
        if error := self._writing.exception():
            return NOT_FINITE if isinstance(error, NotFiniteError) else FAILED
        return self._writing.result()

    def settle(self, written, model: tuple[int, int] | None = None) -> None:
        """Complete the checkpoint if all ranks have written their parts, or remove it if one of them failed.

        written: `written()` of each rank. model: (bytes, checksum) of the checkpoint's model.bin, if it has one.
        """
        if self._facts is None or not all(written):
            return
        facts = self._facts
        self._facts = None
        part = self._part_folder(facts["step"])
        if min(written) < 0:
            if self.written() == FAILED:
                words = self._words(self._writing.exception())
                self._complain(f"the checkpoint of step {facts['step']} was not written: {words}")
            if self.world.rank == 0:
                self._completing = self._thread.submit(shutil.rmtree, part, True)
        elif self.world.rank == 0:
            files = {checkpoint_files.rank_file(rank): int(size) for rank, size in enumerate(written)}
            if model is not None:
                files[checkpoints.MODEL], facts[checkpoints.MODEL_CHECKSUM] = model
            self._completing = self._thread.submit(self._complete, part, facts, files)

    def end_if_not_finite(self, written) -> None:
        """End the job if a rank's part is not finite. Collective. written: see settle.

        `settle` has removed that checkpoint. The checkpoint before it stays.
        """
        if NOT_FINITE in written:
            with self.world.together(NotFiniteError):
                if self.written() == NOT_FINITE:
                    raise self._writing.exception()

    def leave_last(self, step: int, model: WholeModel | None) -> None:
        """Write the checkpoint of the last step, and wait until it is complete. Raise UserError if that fails.

        If this start made no step, the checkpoint that it resumed from is the last one. model: to be written as
        model.bin in llm.c's format, None if the run has not made all its steps.
        """
        written_model = problem = None
        if self.every is None:
            with self.world.together(NotFiniteError):
                if found := checkpoints.not_finite(self.layout, self._own_arrays()):
                    raise NotFiniteError(step, found)
        elif step in self.steps:
            # Evaluated parameters may replace the others, of which the thread then needs a copy.
            self.begin(step, goes_on=self.strategy.traits.takes_local_steps)
            if model is not None:
                with model.evaluated():
                    written_model, problem = self._write_model(self._part_folder(step), model)
        if self._facts is not None:
            self.end_if_not_finite(self._settle_begun(written_model))
        self._thread.shutdown()
        errors = [future.exception() for future in (self._writing, self._completing) if future is not None]
        problems = [UserError(self._words(error)) for error in errors if error] + ([problem] if problem else [])
        with self.world.together(UserError):
            if problems:
                raise problems[0]

    def _write_model(self, folder: Path, model: WholeModel) -> tuple[tuple[int, int] | None, UserError | None]:
        """Write model.bin on rank 0. Return (bytes, checksum) and the error; either may be None."""
        ranges = model.ranges()
        path = folder / checkpoints.MODEL
        try:
            if self.world.rank == 0:
                self._make_folder()
                with file_errors(folder, "free some space, or choose another --out"):
                    folder.mkdir(exist_ok=True)
                    llmc.write_parameters(path, model.parameters, _finite(path, model.parameters, ranges))
                    return (path.stat().st_size, checkpoint_files.file_checksum(path)), None
        except UserError as error:
            return None, error
        except MemoryError as error:
            return None, UserError(f"{path}: {self._words(error)}")
        finally:
            # Bringing the ranges is collective: other ranks take part, and so does rank 0 after a failure.
            for _ in ranges:
                pass
        return None, None

    def _settle_begun(self, model: tuple[int, int] | None = None) -> list[int]:
        """Wait until all parts are written, settle the checkpoint, and return `written()` of each rank."""
        wait(Condition(self._writing.done))
        written = gather_everywhere(self.world.comm, self.written())[:, 0].astype(int).tolist()
        self.settle(written, model)
        return written

    def _complete(self, part: Path, facts: dict, files: dict) -> None:
        try:
            checkpoint_files.check_parts(part, facts, files)
            # complete() checks the lock once everything is on disk. Writing takes long; meanwhile another job may have
            # taken over and written a checkpoint of the same name.
            checkpoints.complete(part, facts, files, self.check_lock)
        except Exception as error:  # any kind, as nothing else sees it before the end of the run
            self._complain(f"the checkpoint of step {facts['step']} was not written: {self._words(error)}")
            shutil.rmtree(part, ignore_errors=True)
            raise
        self.check_lock()
        try:
            checkpoints.remove_old(self.folder, *self.keep)
        except OSError as error:  # extra checkpoints do no harm; the next checkpoint tries to remove them again
            self._complain(f"an old checkpoint was not removed: {self._words(error)}")

    def _complain(self, text: str) -> None:
        say(f"rank {self.world.rank} on {self.world.host}: {text}", on_stderr=True)

    def _words(self, error) -> str:
        if isinstance(error, UserError):
            return str(error)
        if isinstance(error, FileNotFoundError) and not self.folder.exists():
            return f"{self.folder} is gone: somebody removed it, or its disk"
        if isinstance(error, MemoryError):
            return "no memory left for a copy of the state: use more nodes, or a strategy that shards it"
        if not isinstance(error, OSError):
            return f"{type(error).__name__}: {error}"
        return f"{error.filename or self.folder}: {error.strerror or error}: {ADVICE}"

    def _copied(self) -> list:
        """Return a copy of `_pieces`, in memory that the next checkpoint reuses."""
        needed = sum(len(values) for _, _, values in self._pieces())
        if self._room is None or len(self._room) < needed:
            self._room = np.empty(needed, np.float32)
        copied = []
        used = 0
        for array, start, values in self._pieces():
            room = self._room[used : used + len(values)]
            room[:] = values
            copied.append((array, start, room))
            used += len(values)
        return copied

    def _own_arrays(self):
        """Yield (array, start, values in host memory) of everything that this rank updates, without padding."""
        for array, first, values in state_arrays(self.strategy):
            yield self._prefix + array, first, on_host(values[: max(0, self.layout.count - first)])

    def _pieces(self):
        """Yield (array, start, values in host memory) of everything that this rank writes."""
        for array, first, values in state_arrays(self.strategy):
            for start, stop in self._parts:
                low = max(start, first)
                high = min(stop, first + len(values))
                if low < high:
                    yield self._prefix + array, low, on_host(values[low - first : high - first])
        for array, first, values in self.strategy.own_arrays():
            yield array, first, on_host(values[: max(0, self.layout.count - first)])
        if (errors := self.strategy.errors()) is not None:
            yield self._errors_name, 0, on_host(errors)


def _finite(path: Path, parameters, ranges):
    """Check each range of the parameters, then yield it. Raise UserError if a number is not finite."""
    for start, stop in ranges:
        weights.check_finite(path, parameters, start, stop)
        yield start, stop
