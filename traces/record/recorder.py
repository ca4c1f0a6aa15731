"""Tracer: time the phases of each step on one rank and write them to the rank's trace file."""

import os
from contextlib import contextmanager, suppress
from time import perf_counter_ns

from traces.record import files
from traces.record.files import RECORD, RecordFile
from traces.record.phases import INDEX, NAMES, STEP, check_phase
from traces.record.steps import TracedSteps
from traces.record.stream_times import GPU_PHASES, StreamTimes

# Short steps are written between steps, so that no step includes the writing. Long steps are written inside, so that a
# crash loses at most a second.
WRITE_AT_STEP_END_NS = 500_000_000
WRITE_AT_PHASE_END_NS = 1_000_000_000
PROBES = 500  # spans that tracing_share measures: they take a millisecond


class Tracer:
    """Times phases, keeps the current step's sums, and writes every span of the traced steps.

    folder: where the trace files go (RUN/traces); None to write nothing. identity: as in files.py.
    steps: the steps to write: "on", "off" or "FROM:TO", counted from 1, both included. "on" writes the regular steps of
    steps.py, and steps for which `keep_step` was called.
    most_bytes: limit of this rank's files; the write that reaches it ends the tracing, and `is_full` becomes true.
    waits: open no file before `begin` is called, and keep spans in memory until then.
    clock: of this rank's node at the start (files.py); None: all ranks read the same clock.
    counters: the node's CounterFile, on the rank that samples it.
    on_phase: called with (name, step) when a phase begins and (None, step) when it has ended, traced or not.
    device: the rank's GPU (stream_times.py). Its stream is waited for at the end of a step, and when a step's seconds
    are read earlier.
    on_stream: phases to time on the stream. Exchanges that queue work there (NCCL, a last copy) must be among them.

    Spans nest as step > phase and no deeper. A phase between steps (eval, checkpoint) has the number of the step before
    it and counts in no step's seconds. The files of an earlier run in the same folder are replaced. An OSError ends the
    tracing, not the run, and is kept in `failure`. A phase costs about two microseconds. With a device, spans are known
    at the end of their step: a process that is killed loses the spans of its last step.
    """

    def __init__(
        self, folder=None, identity: dict | None = None, steps: str = "on", clock: dict | None = None,
        counters=None, on_phase=None, device=None, on_stream=GPU_PHASES, most_bytes: float = float("inf"),
        waits: bool = False,
    ):  # fmt: skip
        self._on_phase = on_phase
        self._steps = TracedSteps(steps)
        self._keeps = True  # whether the step is written when it ends
        self._most_bytes = most_bytes
        self.is_full = False
        self._may_write = folder is not None and steps != "off"
        self._trace = None
        self._files: list[RecordFile] = []
        self._counters = counters
        self.traced_ns = 0  # the time of the steps that were kept
        self._spent = dict.fromkeys(NAMES, 0)
        self._step_number = 0
        self._in_step = False
        self._phase = None
        self._stream = None if device is None else StreamTimes(device, on_stream)
        self._new_phase = _Phase if device is None else _StreamPhase
        self._written_at = perf_counter_ns()
        self.failure: OSError | None = None
        if self._may_write:
            self._folder = folder
            self._identity = identity
            path = files.trace_path(folder, identity["rank"])
            self._trace = RecordFile(path, files.header_of(identity, clock), RECORD)
            self._files = [self._trace] if counters is None else [self._trace, counters]
        if not waits:
            self.begin()
        self._writing = self._is_traced(0)

    def begin(self) -> None:
        """Open the files and write all spans recorded so far."""
        if not self._may_write or self._trace.is_open:
            return
        with self._or_stop():
            self._trace.begin()
            files.remove_earlier(self._folder, self._identity)
            if self._counters is not None:
                self._counters.begin()
        self._write()

    @contextmanager
    def step(self, number: int):
        """Time the step `number`, counted from 1. Its beginning resets the sums of `seconds`."""
        if self._in_step or self._phase:
            raise RuntimeError(f"step {number} opened inside another step or phase; close that one first")
        if self._stream is not None:
            self._stream.begin_step(number)
        self._in_step = True
        self._step_number = number
        self._writing = self._is_traced(number)
        self._spent = dict.fromkeys(NAMES, 0)
        if self._writing:
            self._begin_step(number)
        start = perf_counter_ns()
        failed = True
        try:
            yield
            failed = False
        finally:
            if self._stream is not None:
                self._stream.end_step(failed)
            self._end_step(start, perf_counter_ns(), failed)

    def phase(self, name: str, bytes: int = 0, root: int | None = None):
        """Return a context manager for a phase.

        bytes: size in memory of the vector that this rank exchanges: in training float32, whatever the wire.
        root: a world rank or None.
        """
        return self._new_phase(self, check_phase(name), bytes, -1 if root is None else root)

    @contextmanager
    def interruption(self, name: str, bytes: int = 0, root: int | None = None):
        """Close the open phase, time the block as this phase, and reopen the first: no time counts twice."""
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
        """Write the current step, even if it is not a regular one."""
        self._keeps = True

    def moves_on(self) -> None:
        """Tell `on_phase` that this rank makes progress in its phase."""
        if self._on_phase is not None and self._phase:
            self._on_phase(self._phase._name, self._step_number)

    def seconds(self, *names: str) -> float:
        """Return the seconds spent in these phases in the current step, or in the last one once it has ended.

        "step" is the whole step, known once it has ended.
        """
        if self._stream is not None and self._in_step:
            self._stream.settle()
        return sum(self._spent[name if name == STEP else check_phase(name)] for name in names) * 1e-9

    @property
    def counters_ns(self) -> int:
        """Nanoseconds spent reading the node's counters."""
        return 0 if self._counters is None else self._counters.spent_ns

    def close(self) -> None:
        """Write the rest and close the files. Phases are still timed and summed."""
        if self._stream is not None:
            self._stream.settle_without_waiting()
        self._write()
        with self._or_stop():
            self._close_files()

    @contextmanager
    def _or_stop(self):
        """Keep an OSError of the block as `failure`, and stop writing."""
        try:
            yield
        except OSError as error:
            self.failure = error
            with suppress(OSError):
                self._close_files()

    def _close_files(self) -> None:
        self._may_write = False
        self._writing = False
        for file in self._files:
            file.close()

    def _is_traced(self, step: int) -> bool:
        return self._may_write and step in self._steps

    def _begin_step(self, number: int) -> None:
        """Decide whether the step is kept, mark where its records begin, and read the counters."""
        self._keeps = self._steps.keep(number)
        self._marks = [(file.records, len(file.records)) for file in self._files]
        self._marked_counters_ns = self.counters_ns
        if self._counters is not None:
            self._counters.read_at(perf_counter_ns())

    def _end_step(self, start: int, end: int, failed: bool) -> None:
        """Keep the records of the step or drop them. failed: the step ended the run, and is kept."""
        self._in_step = False
        self._spent[STEP] = end - start
        if not self._writing:
            return
        if self._keeps or failed:
            self.traced_ns += end - start
            self._trace.records.append((self._step_number, INDEX[STEP], -1, start, end, 0))
            if self._counters is not None:
                self._counters.read_at(end)
        else:
            for records, count in self._marks:
                del records[count:]
            if self._counters is not None:
                self._counters.spent_ns = self._marked_counters_ns
        self._keeps = True
        if end - self._written_at >= WRITE_AT_STEP_END_NS:
            self._write()

    def _write(self) -> None:
        """Hand the records to the operating system."""
        if not self._may_write or not self._trace.is_open:
            return
        with self._or_stop():
            for file in self._files:
                file.write()
            if sum(file.written_bytes for file in self._files) >= self._most_bytes:
                self.is_full = True
                self._close_files()
        self._written_at = perf_counter_ns()


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
            tracer._trace.records.append((tracer._step_number, INDEX[self._name], self._root, start, end, self._bytes))

    def _leave(self, now: int) -> None:
        """Sample the counters, write the file if it is time, and tell `on_phase`."""
        tracer = self._tracer
        if tracer._writing:
            if tracer._counters is not None:
                tracer._counters.sample(now)
            if tracer._keeps and now - tracer._written_at >= WRITE_AT_PHASE_END_NS:
                tracer._write()
        if tracer._on_phase is not None:
            tracer._on_phase(None, tracer._step_number)


class _StreamPhase(_Phase):
    """A phase with a GPU. Its span is known when its edges are settled: at the end of its step at the latest."""

    __slots__ = ()

    def __enter__(self):
        super().__enter__()
        self._start = self._tracer._stream.begin(self._name)

    def __exit__(self, *exception):
        self._tracer._phase = None
        self._tracer._stream.end(self._name, self._start, self._report)
        self._leave(perf_counter_ns())


def tracing_share(tracer: Tracer) -> float:
    """Return the fraction of the traced steps' time that writing spans and reading counters took."""
    if not tracer.traced_ns:
        return 0.0
    return (tracer._trace.written * _span_ns() + tracer.counters_ns) / tracer.traced_ns


def _span_ns() -> float:
    """Measure the nanoseconds of one phase, its writing included."""
    probe = Tracer()
    probe._trace = RecordFile(os.devnull, {}, RECORD)  # not a real folder, whose disk may be full
    probe._trace.begin()
    probe._files = [probe._trace]
    probe._may_write = True
    probe._writing = True
    start = perf_counter_ns()
    for _ in range(PROBES):
        with probe.phase("wait"):
            pass
    probe.close()
    return (perf_counter_ns() - start) / PROBES
