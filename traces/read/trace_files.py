"""The files of RUN/traces, read back and checked: traces/record/files.py says what is in them.

All times that come from here are in nanoseconds on rank 0's clock.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from traces.read import checks
from traces.read.tails import from_a_whole_step, read_records
from traces.record.files import (
    CALLS_FORMAT,
    COUNTERS,
    COUNTERS_FORMAT,
    END_CLOCKS,
    END_LINKS,
    RECORD,
    TRACE_FORMAT,
    VERSION,
    RunError,
)
from traces.record.phases import INDEX, NAMES

COUNTERS_HEADER = {
    "format": checks.one_of(COUNTERS_FORMAT),
    "version": checks.one_of(VERSION),
    "node": checks.RANK,
    "host": checks.NAME,
    "ports": checks.TEXT.listed(),
}
CALLS_HEADER = {
    "format": checks.one_of(CALLS_FORMAT),
    "version": checks.one_of(VERSION),
    "phases": checks.one_of_each(NAMES),
    "fields": checks.Rule(lambda value: value == [list(field) for field in RECORD.descr], "a record's fields"),
}
AT_END = {END_CLOCKS: checks.CLOCK | {"node": checks.RANK, "at_ns": checks.TIME_NS}, END_LINKS: checks.LINK}
MOST_DRIFT = 0.1  # of the time between the two measurements: no clock runs so wrong


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace. `records`: array of RECORD in the order of their ends; `calls`: such of the calls that were
    under way beside each other, and so lie inside phases or across them."""

    identity: dict
    clock: dict
    records: np.ndarray
    calls: np.ndarray = field(default_factory=lambda: np.empty(0, RECORD))


@dataclass(frozen=True)
class NodeCounters:
    """One node's counters. `records`: array of COUNTERS by time."""

    node: int
    host: str
    ports: list[str]
    records: np.ndarray


def read_trace(path, end_clocks: dict[int, dict] | None = None, most_bytes: int | None = None) -> RankTrace:
    """Read one rank's trace file. end_clocks: the nodes' clocks at the end of the run, where they are known.
    most_bytes: of a longer file its last whole steps alone, in so many bytes.

    RunError with one line for a file that cannot be read, is none, or holds what no tracer writes (checks.py).
    """
    try:
        header, records, is_cut = read_records(path, RECORD, lambda line: _parse_header(path, line), most_bytes)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from None
    try:
        return _on_rank_0s_clock(header, records, is_cut, end_clocks or {})
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; run the training again") from None


def read_calls(path, end_clocks: dict[int, dict], most_bytes: int | None = None) -> tuple[dict, np.ndarray]:
    """One rank's calls: who made them, and array of RECORD; of a longer file the last `most_bytes`. OSError, or
    ValueError if it is no such file."""
    header, calls, _ = read_records(path, RECORD, checks.parse, most_bytes)
    checks.check_fields("its header", header, CALLS_HEADER)
    identity, clock = header.get("identity"), header.get("clock")
    checks.check_identity(identity)
    checks.check_clock(clock)
    if len(calls) and not (calls["phase"].min() >= 0 and calls["phase"].max() < len(header["phases"])):
        raise ValueError("a call is of a phase that its header does not list")
    calls["phase"] = np.array([INDEX[name] for name in header["phases"]], "<i4")[calls["phase"]]
    checks.check_calls(calls, identity["ranks"])
    _move(calls, clock, end_clocks.get(identity["node"]))
    return identity, calls


def read_counters(path, end_clocks: dict[int, dict], most_bytes: int | None = None) -> NodeCounters:
    """Read one node's file; end_clocks, most_bytes: as read_trace's. OSError, or ValueError if it is none."""
    header, records, _ = read_records(path, COUNTERS, checks.parse, most_bytes)
    checks.check_fields("its header", header, COUNTERS_HEADER)
    checks.check_clock(header.get("clock"))
    checks.check_samples(records)
    records["time"] = to_rank_0(records["time"], header["clock"], end_clocks.get(header["node"]))
    return NodeCounters(header["node"], header["host"], header["ports"], records)


def read_at_end(folder, name: str) -> dict[int, dict]:
    """END_CLOCKS or END_LINKS by node; nothing where the run did not come to its end. OSError, ValueError: damaged."""
    path = Path(folder) / name
    if not path.exists():
        return {}
    found = checks.parse(checks.read_bytes(path))
    if type(found) is not list:
        raise ValueError("no list of nodes")
    for node in found:
        checks.check_fields("a node", node, AT_END[name])
    return {node["node"]: node for node in found}


def _on_rank_0s_clock(header: dict, records: np.ndarray, is_cut: bool, end_clocks: dict[int, dict]) -> RankTrace:
    """The checked trace, its phases in the order of NAMES; ValueError where something cannot be."""
    identity, clock = header["identity"], header["clock"]
    checks.check_identity(identity)
    checks.check_clock(clock)
    if len(records) and not (records["phase"].min() >= 0 and records["phase"].max() < len(header["phases"])):
        raise ValueError("a record names a phase that its header does not list")
    if header["phases"] != list(NAMES):
        records["phase"] = np.array([INDEX[name] for name in header["phases"]], "<i4")[records["phase"]]
    records = from_a_whole_step(records) if is_cut else records
    checks.check_records(records, identity["ranks"])
    end_clock = end_clocks.get(identity["node"])
    _move(records, clock, end_clock)
    # Between the two measurements the larger of their errors bounds the interpolated offset's.
    error_ns = max(clock["error_ns"], end_clock["error_ns"] if end_clock else 0)
    return RankTrace(identity, clock | {"error_ns": error_ns}, records)


def _move(records: np.ndarray, start: dict, end: dict | None) -> None:
    """Bring spans onto rank 0's clock; as to_rank_0."""
    for name in ("start", "end"):
        records[name] = to_rank_0(records[name], start, end)


def to_rank_0(times: np.ndarray, start: dict, end: dict | None) -> np.ndarray:
    """Times (int64 ns) of a node on rank 0's clock, from the node's clocks at the start and, if known, at the end.

    ValueError: the two cannot be of one clock.
    """
    if end is None or "at_ns" not in start or end["at_ns"] == start["at_ns"]:
        return times + start["offset_ns"]
    drift = (end["offset_ns"] - start["offset_ns"]) / (end["at_ns"] - start["at_ns"])
    if end["at_ns"] < start["at_ns"] or abs(drift) > MOST_DRIFT:
        raise ValueError("its clock and the one in clocks.json are not the same node's")
    return times + start["offset_ns"] + np.rint((times - start["at_ns"]) * drift).astype(np.int64)


def _parse_header(path, line: bytes) -> dict:
    """The header of a trace file of this version, its parts there and its phases known."""
    try:
        header = checks.parse(line)
        is_trace = line.endswith(b"\n") and header["format"] == TRACE_FORMAT
    except (ValueError, KeyError, TypeError):
        is_trace = False
    if not is_trace:
        raise RunError(f"{path} is not a trace file: its first line is not the header of a {TRACE_FORMAT}; remove it")
    if header.get("version") != VERSION:
        found = checks.shown(header.get("version"))
        raise RunError(f"{path} has trace version {found}, expected {VERSION}; read it with the release that wrote it")
    missing = [name for name in ("identity", "phases", "fields", "clock") if name not in header]
    if missing:
        raise RunError(f"{path} is damaged: its header lacks {', '.join(missing)}; run the training again")
    phases = header["phases"] if type(header["phases"]) is list else [header["phases"]]
    unknown = [name for name in phases if type(name) is not str or name not in INDEX]
    if unknown:
        names = ", ".join(name if checks.NAME.accepts(name) else checks.shown(name) for name in unknown[:5])
        raise RunError(f"{path} holds phases unknown here: {names}; update this program")
    if len(set(phases)) < len(phases) or header["fields"] != [list(field) for field in RECORD.descr]:
        raise RunError(f"{path} is damaged: its header lists other phases or fields; run the training again")
    return header
