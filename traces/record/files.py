"""What a run leaves in RUN/traces, as it is written. traces/read/trace_files.py reads it.

rank-00000.trace, one file per rank: a line of JSON, "\\n", then records of 36 bytes until the end. The line holds
`format` and `version`; `identity` (rank, ranks, node, host, local_rank, strategy); `phases`, the names that a record's
`phase` counts into; `fields`, the record's layout as NumPy writes it; and `clock`. A record is `RECORD`.

rank-00000.calls, of a rank that has several calls under way at once: calls.py.

node-00000.counters, one file per node, of its network counters: a line of JSON (`format`, `version`, `node`, `host`,
`ports`, `clock`), "\\n", then records of `COUNTERS` until the end.

clocks.json: the clocks of all nodes at the end of the run, [{"node", "offset_ns", "error_ns", "at_ns"}, ...].
links.json: their links as measured once more then, [{"node", "host", "latency_s", "in", "out", "both"}, ...].

A `clock` says how to get from a node's own time to rank 0's: `offset_ns` is to be added; `error_ns` bounds that
offset's error; `at_ns` is when it was measured, in the node's own time. The files hold the clock at the start. Clocks
drift by tens of microseconds a second, so that a reader interpolates between start and end. A run that crashed has no
clocks at its end.

Records are little-endian without padding. A crash, or a full disk, may cut the last one short: readers drop it. Files
are not buffered here, so after an error nothing more of them is written, and what they hold stays readable.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from traces.record.phases import NAMES

RUN_FORMAT = "gpt2-mpi run 1"  # config.json's
TRACE_FORMAT, CALLS_FORMAT, COUNTERS_FORMAT = "gpt2-mpi trace", "gpt2-mpi calls", "gpt2-mpi counters"
END_CLOCKS, END_LINKS = "clocks.json", "links.json"
VERSION = 1
SAMPLE_NS = 5_000_000  # a reading takes 5 to 20 us: at this distance below half a percent of the time

# start and end: time.perf_counter_ns(). root: the world rank that collects or sends, -1 without one.
RECORD = np.dtype(
    [("step", "<i4"), ("phase", "<i4"), ("root", "<i4"), ("start", "<i8"), ("end", "<i8"), ("bytes", "<i8")]
)
# time: time.perf_counter_ns(). in, out: bytes through the node's ports since some moment; stalled: InfiniBand's
# port_xmit_wait, 0 without.
COUNTERS = np.dtype([("time", "<i8"), ("in", "<i8"), ("out", "<i8"), ("stalled", "<i8")])


class RunError(Exception):
    """A run folder or a trace setting that cannot be used; the text says what to do."""


def trace_path(folder, rank: int) -> Path:
    return Path(folder) / f"rank-{rank:05d}.trace"


def calls_path(folder, rank: int) -> Path:
    return Path(folder) / f"rank-{rank:05d}.calls"


def counters_path(folder, node: int) -> Path:
    return Path(folder) / f"node-{node:05d}.counters"


def create(folder, identity: dict, clock: dict | None):
    """Start one rank's trace file: make the folder, write the header. Returns the open binary file."""
    path = trace_path(folder, identity["rank"])
    path.parent.mkdir(parents=True, exist_ok=True)
    if identity["rank"] == 0:
        # What an earlier run in the same folder left: of its end, and files of ranks that this one does not have.
        for name in (END_CLOCKS, END_LINKS):
            (path.parent / name).unlink(missing_ok=True)
        for earlier in path.parent.glob("rank-*.*"):
            rank = earlier.stem.removeprefix("rank-")
            if earlier.suffix in (".trace", ".calls") and rank.isdecimal() and int(rank) >= identity["ranks"]:
                earlier.unlink()
    return begin(path, header_of(TRACE_FORMAT, identity, clock))


def header_of(kind: str, identity: dict, clock: dict | None) -> dict:
    """What stands before the records of one rank. clock: None where all ranks read the same one."""
    clock = clock or {"offset_ns": 0, "error_ns": 0}
    header = {"format": kind, "version": VERSION, "identity": identity}
    return header | {"phases": NAMES, "fields": RECORD.descr, "clock": clock}


def begin(path: Path, header: dict):
    """A new binary file, open and unbuffered, whose first line is the header. OSError: then no file stays."""
    file = path.open("wb", buffering=0)
    try:
        append(file, json.dumps(header).encode() + b"\n")
    except OSError:
        with suppress(OSError):
            file.close()
            path.unlink()
        raise
    return file


def append(file, data: bytes) -> None:
    """Hand it all to the operating system at once. OSError: a part of it may be written."""
    while data:
        data = data[file.write(data) :]


def write_at_end(folder, name: str, nodes: list[dict]) -> None:
    """What was measured at the end of the run, of each node: END_CLOCKS or END_LINKS. OSError: then no file stays."""
    path = Path(folder) / name
    try:
        path.write_text(json.dumps(nodes) + "\n")
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


class CounterFile:
    """Samples a node's network counters into its file.

    The node's first rank does it at both ends of a step, so that what passed the ports belongs to that step alone, and
    where its phases end. read() gives (bytes in, bytes out, stalled ticks). The file is there from `begin` on;
    OSError if it cannot be.
    """

    def __init__(self, folder, identity: dict, ports: list[str], clock: dict, read: Callable[[], tuple[int, int, int]]):
        self._header = {"format": COUNTERS_FORMAT, "version": VERSION, "ports": ports, "clock": clock}
        self._header |= {name: identity[name] for name in ("node", "host")}
        self._path = counters_path(folder, identity["node"])
        self._read, self._records, self._sampled_at = read, [], 0
        self._file, self.spent_ns, self.written_bytes = None, 0, 0

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = begin(self._path, self._header)

    def sample(self, now: int) -> None:
        """Called where a phase ends, at `now`; reads if the last sample is SAMPLE_NS old."""
        if now - self._sampled_at >= SAMPLE_NS:
            self.read_at(now)

    def read_at(self, now: int) -> None:
        """Called at both ends of a step, at `now`: reads, however old the last sample is."""
        values = self._read()
        self._records.append((perf_counter_ns(), *values))
        self._sampled_at = now
        self.spent_ns += perf_counter_ns() - now

    def mark(self) -> tuple[int, int]:
        """What `back_to` is to leave."""
        return len(self._records), self.spent_ns

    def back_to(self, mark: tuple[int, int]) -> None:
        """Leave out what came after."""
        records, self.spent_ns = mark
        del self._records[records:]

    def write(self) -> None:
        """Hand the records so far to the operating system."""
        if self._records:
            append(self._file, np.array(self._records, COUNTERS).tobytes())
            self.written_bytes += len(self._records) * COUNTERS.itemsize
            self._records.clear()

    def close(self) -> None:
        """Close the file, if there is one, without what is not written."""
        if self._file is not None:
            self._file.close()
