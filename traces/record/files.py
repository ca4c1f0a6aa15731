"""The files of RUN/traces, as a run writes them. traces/read/trace_files.py reads them.

rank-00000.trace, one file for each rank: a line of JSON, "\\n", then records of 36 bytes until the end. The line holds
`format` and `version`; `identity` (rank, ranks, node, host, local_rank, strategy); `phases`, the names that a record's
`phase` indexes; `fields`, the record's layout as NumPy writes it; and `clock`. A record is `RECORD`.

node-00000.counters, one file for each node, of its network counters: a line of JSON (`format`, `version`, `node`,
`host`, `ports`, `clock`), "\\n", then records of `COUNTERS` until the end.

clocks.json: the clocks of all nodes at the end of the run, [{"node", "offset_ns", "error_ns", "at_ns"}, ...].
links.json: the nodes' links, measured again at the end, [{"node", "host", "latency_s", "in", "out", "both"}, ...].

A `clock` converts a node's own time to rank 0's: add `offset_ns`. `error_ns` bounds that offset's error. `at_ns` is
when it was measured, in the node's own time. The files hold the clock at the start. Clocks drift by tens of
microseconds a second, so readers interpolate between start and end. A run that crashed has no clocks at its end.

Records are little-endian without padding. A crash or a full disk may cut the last one short: readers drop it. Files are
unbuffered, so they stay readable after an error, which ends the writing.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from traces.record.phases import NAMES

RUN_FORMAT = "gpt2-mpi run 1"  # of config.json
TRACE_FORMAT = "gpt2-mpi trace"
COUNTERS_FORMAT = "gpt2-mpi counters"
END_CLOCKS = "clocks.json"
END_LINKS = "links.json"
VERSION = 1
SAMPLE_NS = 5_000_000  # between two readings. A reading takes 5 to 20 us, less than 0.5% of this interval

# start and end: time.perf_counter_ns(). root: the world rank that collects or sends, -1 without one.
RECORD = np.dtype(
    [("step", "<i4"), ("phase", "<i4"), ("root", "<i4"), ("start", "<i8"), ("end", "<i8"), ("bytes", "<i8")]
)
# time: time.perf_counter_ns(). in, out: bytes through the node's ports since an arbitrary moment; stalled:
# InfiniBand's port_xmit_wait, 0 on other networks.
COUNTERS = np.dtype([("time", "<i8"), ("in", "<i8"), ("out", "<i8"), ("stalled", "<i8")])


class RunError(Exception):
    """An unusable run folder or trace setting. The text says what to do."""


def trace_path(folder, rank: int) -> Path:
    return Path(folder) / f"rank-{rank:05d}.trace"


def counters_path(folder, node: int) -> Path:
    return Path(folder) / f"node-{node:05d}.counters"


def remove_earlier(folder, identity: dict) -> None:
    """On rank 0, remove files of an earlier run in the same folder: of its end, and of ranks that this run lacks."""
    if identity["rank"] == 0:
        for name in (END_CLOCKS, END_LINKS):
            (Path(folder) / name).unlink(missing_ok=True)
        for earlier in Path(folder).glob("rank-*.trace"):
            rank = earlier.stem.removeprefix("rank-")
            if rank.isdecimal() and int(rank) >= identity["ranks"]:
                earlier.unlink()


def header_of(identity: dict, clock: dict | None) -> dict:
    """Return the header of one rank's trace. clock: None if all ranks read the same clock."""
    clock = clock or {"offset_ns": 0, "error_ns": 0}
    header = {"format": TRACE_FORMAT, "version": VERSION, "identity": identity}
    return header | {"phases": NAMES, "fields": RECORD.descr, "clock": clock}


class RecordFile:
    """A file with a header and records. `records`: tuples that `write` has not written yet. OSError in all methods."""

    def __init__(self, path: Path, header: dict, record: np.dtype):
        self.records = []
        self.written = 0  # records
        self._path = Path(path)
        self._header = header
        self._record = record
        self._file = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    @property
    def written_bytes(self) -> int:
        return self.written * self._record.itemsize

    def begin(self) -> None:
        """Create the file and write its header. After an OSError no file is left."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("wb", buffering=0)
        try:
            _write_all(file, json.dumps(self._header).encode() + b"\n")
        except OSError:
            with suppress(OSError):
                file.close()
                self._path.unlink()
            raise
        self._file = file

    def write(self) -> None:
        """Hand the records to the operating system."""
        if self.records:
            _write_all(self._file, np.array(self.records, self._record).tobytes())
            self.written += len(self.records)
            self.records.clear()

    def close(self) -> None:
        """Close the file, if there is one. Records that were not written are lost."""
        self.records.clear()
        if self.is_open:
            self._file.close()


def _write_all(file, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def write_at_end(folder, name: str, nodes: list[dict]) -> None:
    """Write END_CLOCKS or END_LINKS. After an OSError no file is left."""
    path = Path(folder) / name
    try:
        path.write_text(json.dumps(nodes) + "\n")
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


class CounterFile(RecordFile):
    """Samples a node's network counters into its file.

    The node's first rank samples them at both ends of a step, so that bytes belong to one step, and at the ends of its
    phases. read() returns (bytes in, bytes out, stalled ticks).
    """

    def __init__(self, folder, identity: dict, ports: list[str], clock: dict, read: Callable[[], tuple[int, int, int]]):
        header = {"format": COUNTERS_FORMAT, "version": VERSION, "ports": ports, "clock": clock}
        header |= {name: identity[name] for name in ("node", "host")}
        super().__init__(counters_path(folder, identity["node"]), header, COUNTERS)
        self._read = read
        self._sampled_at = 0
        self.spent_ns = 0

    def sample(self, now: int) -> None:
        """Read the counters at the end of a phase, if the last sample is SAMPLE_NS old."""
        if now - self._sampled_at >= SAMPLE_NS:
            self.read_at(now)

    def read_at(self, now: int) -> None:
        """Read the counters now."""
        values = self._read()
        self.records.append((perf_counter_ns(), *values))
        self._sampled_at = now
        self.spent_ns += perf_counter_ns() - now
