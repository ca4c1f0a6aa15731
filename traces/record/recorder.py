"""Tracer: times the phases of each step on one rank and writes them to the rank's trace file."""

from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter_ns

import numpy as np

from traces.record import files
from traces.record.calls import Call, CallFile
from traces.record.files import RECORD
from traces.record.phases import INDEX, NAMES, STEP, check_phase
from traces.record.steps import TracedSteps
from traces.record.stream_times import GPU_PHASES, StreamTimes

# Short steps write between steps, so that the writing is in nobody's step; long ones write inside, so that a crash
# loses a second at most.
WRITE_AT_STEP_END_NS = 500_000_000
WRITE_AT_PHASE_END_NS = 1_000_000_000


class Tracer:
    """Times phases, keeps the current step's sums, and writes every span of the traced steps.

    folder: where the trace files go (RUN/traces), None to write nothing. identity: as files.py describes it.
    steps: "on", "off", or "FROM:TO", the steps to write, counted from 1, both included. "on" writes those that
    steps.py calls regular, and those of which `keep_step` was called.
    most_bytes: that this rank's files may take; what comes after is not written, and `is_full` says so.
    waits: open no file before `begin` is called. What is traced until then stays in memory.
    clock: of this rank's node at the start (files.py); None: all ranks read the same clock.
    counters: the node's CounterFile, for the one rank of it that samples them.
    on_phase: called with (name, step) when a phase begins and (None, step) when it has ended, traced or not.
    device: the GPU that the rank computes on, as in stream_times.py; None without one. Its stream is waited for at a
    step's end, and where the step's seconds are asked for before.
    on_stream: phases to time on the stream. Exchanges belong to them if they queue work there (NCCL, a last copy).

    Spans nest as step > phase and no deeper. A phase between steps (eval, checkpoint) is written with the number of the
    step before it and counts in no step's seconds. The files of an earlier run in the same folder are replaced.
    An OSError ends the tracing and not the run: `failure` holds it. A phase costs about two microseconds.
    With a device, a step's spans are known at its end: a process that is killed loses those of its last step.
    """

    def __init__(
        self, folder=None, identity: dict | None = None, steps: str = "on", clock: dict | None = None,
        counters=None, on_phase=None, device=None, on_stream=GPU_PHASES, most_bytes: float = float("inf"),
        waits: bool = False,
    ):  # fmt: skip
        self._on_phase = on_phase
        self._steps = TracedSteps(steps)
        self._keeps, self._marks = True, None  # whether the step is written when it ends; what there was before it
        self._most_bytes, self.is_full = most_bytes, False
        self._file, self._calls, self._counters = None, None, counters
        self._records = []
        self.spans = self.traced_ns = 0  # written so far, and the time of the steps that they are from
        self._spent = dict.fromkeys(NAMES, 0)
        self._step_number = 0
        self._in_step, self._phase = False, None
        self._stream = None if device is None else StreamTimes(device, on_stream)
        self._new_phase = _Phase if device is None else _StreamPhase
        self._written_at = perf_counter_ns()
        self.failure: OSError | None = None
        self._create = None  # opens the rank's file, until `begin` has called it
        if folder is not None and steps != "off":
            self._create = partial(files.create, folder, identity, clock)
            self._calls = CallFile(folder, identity, clock)
        if not waits:
            self.begin()
        self._writing = self._is_traced(0)

    def begin(self) -> None:
        """Open the files, and write what has been traced so far."""
        create, self._create = self._create, None
        if create is None:
            return
        with self._or_stop():
            self._file = create()
            self._calls.begin()
            if self._counters is not None:
                self._counters.begin()
        self._write()

    def step(self, number: int):
        """Context manager: the step `number`, counted from 1. Starts the sums of `seconds` anew."""
        return _Step(self, number)

    def phase(self, name: str, bytes: int = 0, root: int | None = None):
        """Context manager: one phase. bytes: what this rank hands to the exchange; root: a world rank, or None."""
        return self._new_phase(self, check_phase(name), bytes, -1 if root is None else root)

    def call(self, name: str, bytes: int, root: int) -> Call:
        """A call that begins now, and goes on beside others: `ended()` when it is complete, or a with block around it.

        It counts in no phase's seconds. name: the phase that it is a part of; bytes, root: as `phase`'s, of this call
        alone. Beside a GPU nothing is written: what is queued there takes its time later.
        """
        is_written = self._writing and self._stream is None
        return Call(self._calls if is_written else None, self._step_number, name, bytes, root)

    @contextmanager
    def interruption(self, name: str, bytes: int = 0, root: int | None = None):
        """Context manager: a phase inside another, which ends here and begins again after it: no time counts twice."""
        interrupted = self._phase
        if interrupted:
            interrupted.__exit__()
        try:
            with self.phase(name, bytes, root):
                yield
        finally:
            if interrupted:
                interrupted.__enter__()

    def keep_step(self) -> None:
        """Write the current step, whether or not it is one that would be."""
        self._keeps = True

    def moves_on(self) -> None:
        """Say, to whoever watches phases, that this rank has come further in the phase that it is in."""
        if self._on_phase is not None and self._phase:
            self._on_phase(self._phase._name, self._step_number)

    def seconds(self, *names: str) -> float:
        """Seconds spent in these phases in the current step, or in the last one after it has ended.

        "step" is the whole step, known once it has ended.
        """
        if self._stream is not None and self._in_step:
            self._stream.settle()
        return sum(self._spent[name if name == STEP else check_phase(name)] for name in names) * 1e-9

    @property
    def counters_ns(self) -> int:
        """Nanoseconds spent on reading the node's counters."""
        return 0 if self._counters is None else self._counters.spent_ns

    def close(self) -> None:
        """Write what is left and close the files; the sums go on working."""
        if self._stream is not None:
            self._stream.settle_without_waiting()
        self._write()
        with self._or_stop():
            self._close_files()

    @contextmanager
    def _or_stop(self):
        """An OSError of the block is kept as `failure`, and nothing is written any more."""
        try:
            yield
        except OSError as error:
            self.failure = error
            with suppress(OSError):
                self._close_files()

    def _close_files(self) -> None:
        file, self._file, self._create, self._writing = self._file, None, None, False
        self._records.clear()
        for each in (file, self._calls, self._counters) if file else ():
            if each is not None:
                each.close()

    def written_bytes(self) -> int:
        """Bytes of this rank's files, without their first lines."""
        return self.spans * RECORD.itemsize + (0 if self._counters is None else self._counters.written_bytes)

    def _is_traced(self, step: int) -> bool:
        return (self._file or self._create) is not None and step in self._steps

    def _begin_step(self, number: int) -> None:
        """Decide whether its spans are written in any case, remember what there was before them, read the counters."""
        self._keeps = self._steps.keep(number)
        counters = self._counters and self._counters.mark()
        self._marks = len(self._records), self._calls.mark(), counters
        if self._counters is not None:
            self._counters.read_at(perf_counter_ns())

    def _forget_step(self) -> None:
        """Leave out all that the step has noted."""
        records, calls, counters = self._marks
        del self._records[records:]
        self._calls.back_to(calls)
        if self._counters is not None:
            self._counters.back_to(counters)

    def _write(self) -> None:
        """Hand the records so far to the operating system."""
        if self._file is None:
            return
        with self._or_stop():
            if self._records:
                files.append(self._file, np.array(self._records, RECORD).tobytes())
                self.spans += len(self._records)
                self._records.clear()
            self.spans += self._calls.write() if self._calls else 0
            if self._counters is not None:
                self._counters.write()
            if self.written_bytes() >= self._most_bytes:
                self.is_full = True
                self._close_files()
        self._written_at = perf_counter_ns()


class _Step:
    __slots__ = ("_number", "_start", "_tracer")

    def __init__(self, tracer: Tracer, number: int):
        self._tracer = tracer
        self._number = number

    def __enter__(self):
        tracer = self._tracer
        if tracer._in_step or tracer._phase:
            raise RuntimeError(f"step {self._number} opened inside another step or phase; close that one first")
        if tracer._stream is not None:
            tracer._stream.begin_step(self._number)
        tracer._in_step, tracer._step_number = True, self._number
        tracer._writing = tracer._is_traced(self._number)
        tracer._spent = dict.fromkeys(NAMES, 0)
        if tracer._writing:
            tracer._begin_step(self._number)
        self._start = perf_counter_ns()

    def __exit__(self, *exception):
        tracer = self._tracer
        if tracer._stream is not None:
            tracer._stream.end_step(any(exception))
        end = perf_counter_ns()
        tracer._in_step = False
        tracer._spent[STEP] = end - self._start
        if not tracer._writing:
            return
        if not tracer._keeps and not any(exception):  # the step that ended a run is written, too
            tracer._forget_step()
        else:
            tracer.traced_ns += end - self._start
            tracer._records.append((self._number, INDEX[STEP], -1, self._start, end, 0))
            if tracer._counters is not None:
                tracer._counters.read_at(end)
        tracer._keeps = True
        if end - tracer._written_at >= WRITE_AT_STEP_END_NS:
            tracer._write()


class _Phase:
    __slots__ = ("_bytes", "_name", "_root", "_start", "_tracer")

    def __init__(self, tracer: Tracer, name: str, bytes: int, root: int):
        self._tracer = tracer
        self._name = name
        self._bytes = bytes
        self._root = root

    def __enter__(self):
        tracer = self._tracer
        if tracer._phase:
            raise RuntimeError(f"phase {self._name} opened inside another phase; its time would count twice")
        tracer._phase = self
        if tracer._on_phase is not None:
            tracer._on_phase(self._name, tracer._step_number)
        self._start = perf_counter_ns()

    def __exit__(self, *exception):
        end = perf_counter_ns()
        self._tracer._phase = None
        self._report(self._start, end)
        self._leave(end)

    def _report(self, start: int, end: int) -> None:
        """Count and keep the span."""
        tracer = self._tracer
        if tracer._in_step:
            tracer._spent[self._name] += end - start
        if tracer._writing:
            tracer._records.append((tracer._step_number, INDEX[self._name], self._root, start, end, self._bytes))

    def _leave(self, now: int) -> None:
        """What else is due when a phase has ended: the node's counters, the file, whoever watches phases."""
        tracer = self._tracer
        if tracer._writing:
            if tracer._counters is not None:
                tracer._counters.sample(now)
            if tracer._keeps and now - tracer._written_at >= WRITE_AT_PHASE_END_NS:
                tracer._write()
        if tracer._on_phase is not None:
            tracer._on_phase(None, tracer._step_number)


class _StreamPhase(_Phase):
    """A phase beside a GPU, whose span is known when its edges are settled: before the step that it is in has ended."""

    __slots__ = ()

    def __enter__(self):
        super().__enter__()
        self._start = self._tracer._stream.begin(self._name)

    def __exit__(self, *exception):
        self._tracer._phase = None
        self._tracer._stream.end(self._name, self._start, self._report)
        self._leave(perf_counter_ns())
