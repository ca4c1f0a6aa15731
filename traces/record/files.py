"""Trace files: what each rank writes of its phases.

RUN/traces/rank-00000.trace, one file per rank: a line of JSON, "\\n", then records of 36 bytes until the end.

The line holds `format` and `version`; `identity` (rank, ranks, node, host, local_rank, strategy); `phases`, the names
that a record's `phase` counts into; `fields`, the record's layout as NumPy writes it; and `clock` (clocks.py).

A record is `RECORD`, little-endian without padding. A last record cut short by a crash is dropped.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traces.read import checks
from traces.record import clocks
from traces.record.phases import INDEX, NAMES

FORMAT = "gpt2-mpi trace"
VERSION = 1
HEADER_NAMES = ("identity", "phases", "fields", "clock")

# start and end: time.perf_counter_ns(). root: the world rank that collects or sends, -1 without one.
RECORD = np.dtype(
    [("step", "<i4"), ("phase", "<i4"), ("root", "<i4"), ("start", "<i8"), ("end", "<i8"), ("bytes", "<i8")]
)


class RunError(Exception):
    """A run folder or a trace setting that cannot be used; the text says what to do."""


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace. `records`: array of RECORD in the order of their ends, times in ns on rank 0's clock."""

    identity: dict
    clock: dict
    records: np.ndarray


def trace_path(folder, rank: int) -> Path:
    return Path(folder) / f"rank-{rank:05d}.trace"


def create(folder, identity: dict, clock: dict):
    """Start one rank's trace file: make the folder, write the header. Returns the open binary file."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "identity": identity,
        "phases": NAMES,
        "fields": RECORD.descr,
        "clock": clock,
    }
    path = trace_path(folder, identity["rank"])
    path.parent.mkdir(parents=True, exist_ok=True)
    if identity["rank"] == 0:
        _remove_surplus(path.parent, identity["ranks"])
    file = path.open("wb")
    append(file, json.dumps(header).encode() + b"\n")
    return file


def _remove_surplus(folder: Path, ranks: int) -> None:
    """Remove what an earlier run in the same folder left: files of ranks that this one does not have, end clocks."""
    (folder / "clocks.json").unlink(missing_ok=True)
    for path in folder.glob("rank-*.trace"):
        if path.stem.removeprefix("rank-").isdecimal() and int(path.stem.removeprefix("rank-")) >= ranks:
            path.unlink()


def append(file, data) -> None:
    """Write bytes or an array of RECORD, and hand them to the operating system at once."""
    file.write(data)
    file.flush()


def read_trace(path, end_clocks: dict[int, dict] | None = None) -> RankTrace:
    """Read one rank's trace file. end_clocks: the nodes' clocks at the end of the run, where they are known.

    RunError with one line for a file that cannot be read, is none, or holds what no tracer writes (checks.py).
    """
    try:
        with open(path, "rb") as file:
            line = file.readline(1 << 20)
            size = file.seek(0, 2)
        header = _parse_header(path, line)
        records = np.fromfile(path, RECORD, count=(size - len(line)) // RECORD.itemsize, offset=len(line))
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from None
    try:
        return _on_rank_0s_clock(header, records, end_clocks or {})
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; run the training again") from None


def _on_rank_0s_clock(header: dict, records: np.ndarray, end_clocks: dict[int, dict]) -> RankTrace:
    """The checked trace, its phases in the order of NAMES; ValueError where something cannot be."""
    identity, clock = header["identity"], header["clock"]
    checks.check_identity(identity)
    checks.check_clock(clock)
    if len(records) and not (records["phase"].min() >= 0 and records["phase"].max() < len(header["phases"])):
        raise ValueError("a record names a phase that its header does not list")
    if header["phases"] != list(NAMES):
        records["phase"] = np.array([INDEX[name] for name in header["phases"]], "<i4")[records["phase"]]
    checks.check_records(records, identity["ranks"])
    end_clock = end_clocks.get(identity["node"])
    for name in ("start", "end"):
        records[name] = clocks.to_rank_0(records[name], clock, end_clock)
    return RankTrace(identity, clock | {"error_ns": clocks.error_ns(clock, end_clock)}, records)


def _parse_header(path, line: bytes) -> dict:
    """The header of a trace file of this version, its parts there and its phases known."""
    try:
        header = checks.parse(line)
        is_trace = line.endswith(b"\n") and header["format"] == FORMAT
    except (ValueError, KeyError, TypeError):
        is_trace = False
    if not is_trace:
        raise RunError(f"{path} is not a trace file: its first line is not the header of a {FORMAT}; remove it")
    if header.get("version") != VERSION:
        found = checks.shown(header.get("version"))
        raise RunError(f"{path} has trace version {found}, this program reads {VERSION}; update the older one")
    missing = [name for name in HEADER_NAMES if name not in header]
    if missing:
        raise RunError(f"{path} is damaged: its header lacks {', '.join(missing)}; run the training again")
    phases = header["phases"] if type(header["phases"]) is list else [header["phases"]]
    unknown = [name for name in phases if type(name) is not str or name not in INDEX]
    if unknown:
        raise RunError(f"{path} holds phases unknown here: {checks.shown_list(unknown)}; update this program")
    if len(set(phases)) < len(phases) or header["fields"] != [list(field) for field in RECORD.descr]:
        raise RunError(f"{path} is damaged: its header lists other phases or fields; run the training again")
    return header
