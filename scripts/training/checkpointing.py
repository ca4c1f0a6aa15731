"""Checkpoints of a run that goes on meanwhile: each rank copies its part of the state, and a thread writes the copy.

Which parts, all ranks settle at the start: what several hold, each writes a share of. That a part is on disk is told
where the ranks meet at the end of a step; when all are, rank 0 completes the checkpoint.
"""

import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dist.ranges import divide_among_holders
from dist.waiting import Condition, gather_everywhere, wait
from gpt2.formats import checkpoints

FAILED = -1
ADVICE = "free some space, or see to the disk"


class Checkpointing:
    """Every rank makes one; `begin`, `settle` and `finish` are collective.

    folder: RUN/checkpoints. count: elements of the flat buffer without its pad. keep: how many complete ones stay.
    `costs`: of each of this rank's parts its step, bytes, the seconds that training stood still for it and those that
    the thread wrote.
    """

    def __init__(self, world, folder: Path, strategy, count: int, keep: int):
        self.world, self.folder, self.keep, self._strategy, self._count = world, folder, keep, strategy, count
        held = [(one.start, one.start + len(one.parameters)) for one in strategy.state()]
        self._parts = divide_among_holders(world.comm.allgather(held), count)[world.rank]
        self._room = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None  # this rank's part
        self._completing: Future | None = None  # rank 0's last word
        self._facts, self.costs = None, []

    def begin(self, facts: dict, goes_on: bool = True) -> None:
        """Copy this rank's part of the state and begin to write it; `facts` are for gpt2.formats.checkpoints.complete.

        If the checkpoint before is not on disk yet, wait for that first. goes_on: else nothing changes the state until
        `finish` returns, and what is in host memory needs no copy.
        """
        begun = time.perf_counter()
        if self._facts is not None:
            self._wait_for_all()
        self._facts = facts
        copied = self._copied() if goes_on else [*self._pieces()]
        self._writing = self._thread.submit(self._write, facts["step"], copied, time.perf_counter() - begun)

    def _write(self, step: int, copied: list, stopped_s: float) -> int:
        begun = time.perf_counter()
        size = checkpoints.write_part(self.part_folder(step), step, self.world.rank, copied)
        writing_s = time.perf_counter() - begun
        self.costs.append({"step": step, "bytes": size, "stopped_s": stopped_s, "writing_s": writing_s})
        return size

    def part_folder(self, step: int) -> Path:
        """Where the checkpoint of that step is being written."""
        return self.folder / f"{checkpoints.folder_name(step)}.part"

    def written(self) -> int:
        """Bytes of this rank's part that are on disk, 0 while it is being written, or FAILED."""
        if self._writing is None or not self._writing.done():
            return 0
        return FAILED if self._writing.exception() else self._writing.result()

    def settle(self, written, model_bytes: int | None = None) -> None:
        """What `written()` was on every rank, by rank: if all have come to an end, so does the checkpoint.

        model_bytes: of a model.bin that is to belong to it.
        """
        if self._facts is None or not all(written):
            return
        facts, self._facts = self._facts, None
        part = self.part_folder(facts["step"])
        if FAILED in written:
            if self.written() == FAILED:
                self._complain(facts["step"], self._writing.exception())
            if self.world.rank == 0:
                self._completing = self._thread.submit(shutil.rmtree, part, True)
        elif self.world.rank == 0:
            files = {checkpoints.rank_file(rank): int(size) for rank, size in enumerate(written)}
            files |= {"model.bin": model_bytes} if model_bytes else {}
            self._completing = self._thread.submit(self._complete, part, facts, files)

    def finish(self, model_bytes: int | None = None) -> str | None:
        """Return when the last checkpoint is complete; or what was wrong, on the ranks that could not write it."""
        if self._facts is not None:
            self._wait_for_all(model_bytes)
        self._thread.shutdown()
        for future in (self._writing, self._completing):
            if future is not None and (error := future.exception()):
                return self._words(error)
        return None

    def _wait_for_all(self, model_bytes: int | None = None) -> None:
        wait(Condition(self._writing.done))
        self.settle(gather_everywhere(self.world.comm, self.written())[:, 0].astype(int).tolist(), model_bytes)

    def _complete(self, part: Path, facts: dict, files: dict) -> None:
        try:
            checkpoints.complete(part, facts, files)
            checkpoints.remove_old(self.folder, self.keep)
        except OSError as error:
            self._complain(facts["step"], error)
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _complain(self, step: int, error) -> None:
        rank, host = self.world.rank, self.world.host
        text = f"rank {rank} on {host}: the checkpoint of step {step} was not written: {self._words(error)}"
        print(text, file=sys.stderr, flush=True)

    def _words(self, error) -> str:
        if isinstance(error, FileNotFoundError) and not self.folder.exists():
            return f"{self.folder} is gone: somebody removed it, or its disk"
        return f"{error.filename or self.folder}: {error.strerror or error}: {ADVICE}"

    def _copied(self) -> list:
        """What `_pieces` gives, as it is now, in memory of this object's."""
        if self._room is None:
            self._room = np.empty(sum(len(values) for _, _, values in self._pieces()), np.float32)
        copied, used = [], 0
        for array, start, values in self._pieces():
            room = self._room[used : used + len(values)]
            room[:] = values
            copied.append((array, start, room))
            used += len(values)
        return copied

    def _pieces(self):
        """(array, start, values in host memory) of this rank's part."""
        for array, first, values in state_arrays(self._strategy):
            for start, stop in self._parts:
                low, high = max(start, first), min(stop, first + len(values))
                if low < high:
                    yield array, low, _on_host(values[low - first : high - first])
        if (errors := self._strategy.errors()) is not None:
            yield errors_name(self.world.rank), 0, _on_host(errors[: self._count])


def state_arrays(strategy):
    """(array, start, values) of everything that a strategy's rank updates, wherever it lies."""
    for updated in strategy.state():
        yield "parameters", updated.start, updated.parameters
        for start, m, v in updated.optimizer.moments():
            yield "m", start, m
            yield "v", start, v


def is_on_gpu(array) -> bool:
    """Whether it is CuPy's."""
    return hasattr(array, "get")


def _on_host(array):
    return array.get() if is_on_gpu(array) else array


def errors_name(rank: int) -> str:
    """What a rank's error feedback is called in a checkpoint: it belongs to that rank's gradients."""
    return f"errors_{rank}"
