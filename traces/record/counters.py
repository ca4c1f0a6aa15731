"""A node's network counters during a run.

RUN/traces/node-00002.counters, one file per node: a line of JSON (`format`, `version`, `node`, `host`, `ports`,
`clock` as in a rank's trace), "\\n", then records of `COUNTERS`, little-endian without padding, until the end. A last
record cut short by a crash is dropped.

The node's first rank reads them where its phases end, so that what passed the ports belongs to a phase.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from traces.read import checks
from traces.record.clocks import to_rank_0

FORMAT = "gpt2-mpi counters"
VERSION = 1
SAMPLE_NS = 5_000_000  # a reading takes 5 to 20 us: at this distance below half a percent of the time

# time: time.perf_counter_ns(). in, out: bytes through the node's ports since some moment; stalled: InfiniBand's
# port_xmit_wait, 0 without.
COUNTERS = np.dtype([("time", "<i8"), ("in", "<i8"), ("out", "<i8"), ("stalled", "<i8")])

HEADER = {
    "format": checks.one_of(FORMAT),
    "version": checks.one_of(VERSION),
    "node": checks.RANK,
    "host": checks.NAME,
    "ports": checks.TEXT.listed(),
}


class CounterFile:
    """Samples a node's counters into its file. read() gives (bytes in, bytes out, stalled ticks)."""

    def __init__(self, folder, identity: dict, ports: list[str], clock: dict, read: Callable[[], tuple[int, int, int]]):
        header = {"format": FORMAT, "version": VERSION, "ports": ports, "clock": clock}
        header |= {name: identity[name] for name in ("node", "host")}
        path = counters_path(folder, identity["node"])
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._file.write(json.dumps(header).encode() + b"\n")
        self._read, self._records, self._sampled_at = read, [], 0
        self.spent_ns = 0

    def sample(self, now: int) -> None:
        """Called where a phase ends, at `now`; reads if the last sample is SAMPLE_NS old."""
        if now - self._sampled_at >= SAMPLE_NS:
            values = self._read()
            self._records.append((perf_counter_ns(), *values))
            self._sampled_at = now
            self.spent_ns += perf_counter_ns() - now

    def write(self) -> None:
        """Hand the records so far to the operating system."""
        if self._records:
            self._file.write(np.array(self._records, COUNTERS))
            self._records.clear()
        self._file.flush()

    def close(self) -> None:
        self.write()
        self._file.close()


@dataclass(frozen=True)
class NodeCounters:
    """One node's counters. `records`: array of COUNTERS by time, times in ns on rank 0's clock."""

    node: int
    host: str
    ports: list[str]
    records: np.ndarray


def counters_path(folder, node: int) -> Path:
    return Path(folder) / f"node-{node:05d}.counters"


def read_counters(path, end_clocks: dict[int, dict]) -> NodeCounters:
    """Read one node's file; end_clocks: the nodes' clocks at the end of the run. OSError, ValueError if it is none."""
    with open(path, "rb") as file:
        line = file.readline(1 << 20)
        size = file.seek(0, 2)
    header = checks.parse(line)
    checks.check_fields("its header", header, HEADER)
    checks.check_clock(header.get("clock"))
    records = np.fromfile(path, COUNTERS, count=(size - len(line)) // COUNTERS.itemsize, offset=len(line))
    checks.check_samples(records)
    records["time"] = to_rank_0(records["time"], header["clock"], end_clocks.get(header["node"]))
    return NodeCounters(header["node"], header["host"], header["ports"], records)
