"""Checkpoints of a run that goes on meanwhile: each rank copies its part of the state, and a thread writes the copy.

All ranks settle at the start who writes what: if several hold the same state, each of them writes a share of it. Where
the ranks meet at the end of a step they tell whether their parts are on disk. When all are, rank 0 completes the
checkpoint.
"""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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

FAILED, NOT_FINITE = -1, -2
ADVICE = "free some space, or see to the disk"
GO_BACK = "lower --lr, or check this node's memory, and go on from the last checkpoint (--resume)"


class NotFiniteError(Exception):
    """The state holds what is no number. No run can go on from that, so it must not become a checkpoint."""


class Checkpointing:
    """Every rank makes one; `begin`, `settle` and `leave_last` are collective.

    folder: RUN/checkpoints. layout: of what this rank holds; run_facts: what every checkpoint of this run says of it
    (Plan.checkpoint_facts). steps: those that this run makes. every: in steps, 0 for the last step alone, None for no
    checkpoint at all. keep: how many complete ones stay, and of which number all multiples do, 0 for none. check_lock:
    ends the job if another start has taken the run folder (RunLock.check). mesh: as state.py's; ranks that hold the
    same piece share out what they write of it, and all ranks of the job settle together.

    `costs` has an entry for each part that this rank wrote: its step, its bytes, the seconds that training stood still
    for it, and the seconds that the thread wrote.
    """

    def __init__(
        self, world, folder: Path, strategy, layout: Layout, run_facts: dict, steps: range, every: int | None,
        keep: tuple[int, int], check_lock: Callable[[], None], mesh=None,
    ):  # fmt: skip
        self.world, self.folder, self.keep, self._strategy, self._run_facts = world, folder, keep, strategy, run_facts
        self.steps, self.every, self._layout, self._check_lock = steps, every, layout, check_lock
        holders = mesh.data_world if shares_model(mesh) else world
        held = [(one.start, one.start + len(one.parameters)) for one in strategy.state()]
        self._parts = divide_among_holders(holders.comm.allgather(held), layout.count)[holders.rank]
        self._prefix, self._errors_name = prefix_of(mesh), errors_name(world.rank, mesh)
        self._room = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None  # this rank's part
        self._completing: Future | None = None  # rank 0's last word
        self._facts, self.costs = None, []

    def __enter__(self):
        return self

    def __exit__(self, kind, *error) -> None:
        """Where all ranks end with one line: the checkpoint that was begun before that is good, and is completed."""
        if kind is SystemExit and self._facts is not None:
            self._settle_begun()
        if kind is SystemExit and self._completing is not None:
            self._completing.exception()  # returns when it is over

    def add_facts(self, facts: dict) -> None:
        """What every checkpoint from now on says of the run, too; the same on all ranks."""
        self._run_facts = self._run_facts | facts

    def is_due(self, step: int, request: int) -> bool:
        """Whether a checkpoint is to begin after this step: it is time for one, or one was requested.

        At the end of the run `leave_last` writes it.
        """
        return self.has(step, request) and not self._ends(step, request)

    def has(self, step: int, request: int) -> bool:
        """Whether there will be a checkpoint of this step, the run's last one included."""
        wanted = request == CHECKPOINT or self._ends(step, request)
        return self.every is not None and (wanted or is_time(step, self.every))

    def _ends(self, step: int, request: int) -> bool:
        return step == self.steps.stop - 1 or request > CHECKPOINT

    def begin(self, step: int, goes_on: bool = True) -> None:
        """Copy this rank's part of the state after that step, and begin to write the copy.

        If the checkpoint before is not on disk yet, wait for that first. Without goes_on nothing changes the state any
        more, and what is in host memory needs no copy.
        """
        begun = time.perf_counter()
        if self._facts is not None:
            self.end_if_not_finite(self._settle_begun())
        # checkpoint.json takes rank 0's number of updates: under every strategy rank 0 updates something in each step.
        updates = next((one.optimizer.step for one in self._strategy.state()), 0)
        norms = list(self._strategy.clipping.norms)
        position = {"step": step, "next_window": step * self._run_facts["global_batch"]}
        self._facts = position | self._run_facts | {"updates": updates, "norms": norms}
        try:
            copied = self._copied() if goes_on else [*self._pieces()]
        except MemoryError as error:
            self._writing = Future()
            self._writing.set_exception(error)
            return
        self._writing = self._thread.submit(self._write, step, copied, time.perf_counter() - begun)

    def _write(self, step: int, copied: list, stopped_s: float) -> int:
        begun = time.perf_counter()
        if found := checkpoints.not_finite(self._layout, copied):
            raise NotFiniteError(f"after step {step} there is {found}")
        self._make_folder()
        run = self._run_facts["run"]
        size = checkpoint_files.write_part(self._part_folder(step), step, self.world.rank, copied, run)
        writing_s = time.perf_counter() - begun
        self.costs.append({"step": step, "bytes": size, "stopped_s": stopped_s, "writing_s": writing_s})
        return size

    def _make_folder(self) -> None:
        """Make checkpoints/ again if somebody has removed it: what is written from now on can still be kept."""
        try:
            self.folder.mkdir()
        except OSError:
            return  # it is there; or the run folder is gone, too, and writing says so
        self._complain(f"{self.folder} was gone, with its checkpoints: made again, for those from now on")

    def _part_folder(self, step: int) -> Path:
        """Where the checkpoint of that step is being written."""
        return self.folder / f"{checkpoints.folder_name(step)}.part"

    def written(self) -> int:
        """Bytes of this rank's part that are on disk, 0 while it is being written, or FAILED, or NOT_FINITE."""
        if self._writing is None or not self._writing.done():
            return 0
        if error := self._writing.exception():
            return NOT_FINITE if isinstance(error, NotFiniteError) else FAILED
        return self._writing.result()

    def settle(self, written, model: tuple[int, int] | None = None) -> None:
        """Complete the checkpoint if all ranks have written their parts, or remove it if one of them could not.

        written: what `written()` said on each rank. model: (bytes, checksum) of its model.bin, if it has one.
        """
        if self._facts is None or not all(written):
            return
        facts, self._facts = self._facts, None
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
        """End the job if a rank has found in its part what is no number: `settle` has removed that checkpoint, and the
        one before stays. Collective; written: as settle's."""
        if NOT_FINITE in written:
            self._end_together(self._writing.exception())

    def _end_together(self, error: Exception | None) -> None:
        with self.world.together(UserError):
            if isinstance(error, NotFiniteError):
                raise UserError(f"{error}, expected finite numbers: {GO_BACK}")

    def leave_last(self, step: int, model: WholeModel | None) -> None:
        """Write the checkpoint of the run's last step, and return when it is complete. UserError: it cannot be.

        If this run made no step, the checkpoint that it went on from is the last one. model: of a run that has made all
        its steps, to be left as model.bin in llm.c's format.
        """
        written_model = problem = None
        if self.every is None:
            found = checkpoints.not_finite(self._layout, self._own_arrays())
            self._end_together(NotFiniteError(f"after step {step} there is {found}") if found else None)
        elif step in self.steps:
            self.begin(step, goes_on=False)
            if model is not None:
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
        """Rank 0 writes model.bin: ((its bytes, its checksum), what was wrong), either or both None."""
        ranges, path = model.ranges(), folder / checkpoints.MODEL
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
            # The other ranks, and rank 0 when its writing has failed, take part in what brings the ranges there.
            for _ in ranges:
                pass
        return None, None

    def _settle_begun(self, model: tuple[int, int] | None = None) -> list[int]:
        """Settle the checkpoint that was begun, when all parts are written; what `written` says on each rank."""
        wait(Condition(self._writing.done))
        written = gather_everywhere(self.world.comm, self.written())[:, 0].astype(int).tolist()
        self.settle(written, model)
        return written

    def _complete(self, part: Path, facts: dict, files: dict) -> None:
        try:
            checkpoint_files.check_parts(part, facts, files)
            self._check_lock()
            # Again when the disk has it, which takes long: another job may have taken over meanwhile, and may have a
            # checkpoint of that name.
            checkpoints.complete(part, facts, files, self._check_lock)
        except Exception as error:  # of whatever kind: nobody else looks at it before the end of the run
            self._complain(f"the checkpoint of step {facts['step']} was not written: {self._words(error)}")
            shutil.rmtree(part, ignore_errors=True)
            raise
        self._check_lock()
        try:
            checkpoints.remove_old(self.folder, *self.keep)
        except OSError as error:  # too many checkpoints are no failure; the next one tries again
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
        """What `_pieces` gives, as it is now, copied into memory that is kept for the next checkpoint."""
        if self._room is None:
            self._room = np.empty(sum(len(values) for _, _, values in self._pieces()), np.float32)
        copied, used = [], 0
        for array, start, values in self._pieces():
            room = self._room[used : used + len(values)]
            room[:] = values
            copied.append((array, start, room))
            used += len(values)
        return copied

    def _own_arrays(self):
        """(array, start, values in host memory) of all that this rank updates, without the pad."""
        for array, first, values in state_arrays(self._strategy):
            yield self._prefix + array, first, on_host(values[: max(0, self._layout.count - first)])

    def _pieces(self):
        """(array, start, values in host memory) of everything in this rank's part."""
        for array, first, values in state_arrays(self._strategy):
            for start, stop in self._parts:
                low, high = max(start, first), min(stop, first + len(values))
                if low < high:
                    yield self._prefix + array, low, on_host(values[low - first : high - first])
        if (errors := self._strategy.errors()) is not None:
            yield self._errors_name, 0, on_host(errors[: self._layout.count])


def _finite(path: Path, parameters, ranges):
    """Yield ranges of the parameters, each checked first; UserError where one holds what is no number."""
    for start, stop in ranges:
        weights.check_finite(path, parameters, start, stop)
        yield start, stop
