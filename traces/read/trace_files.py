"""Read and check the files of RUN/traces, which traces/record/files.py describes.

All times are returned in nanoseconds on rank 0's clock.
"""

from dataclasses import dataclass

import numpy as np

from traces.read import schemas, span_checks
from traces.read.tails import from_a_whole_step, read_records
from traces.record import files
from traces.record.files import RECORD, VERSION, RunError
from traces.record.phases import INDEX, NAMES

COUNTERS_HEADER = {
    "format": schemas.one_of(files.COUNTERS_FORMAT),
    "version": schemas.one_of(VERSION),
    "node": schemas.RANK,
    "host": schemas.NAME,
    "ports": schemas.TEXT.listed(),
}
MOST_DRIFT = 0.1  # fraction of the time between two measurements: no real clock drifts so fast


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace. records: array of RECORD, sorted by end."""

    identity: dict
    clock: dict
    records: np.ndarray


@dataclass(frozen=True)
class NodeCounters:
    """One node's counters. records: array of files.COUNTERS, sorted by time."""

    node: int
    host: str
    ports: list[str]
    records: np.ndarray


def read_trace(path, end_clocks: dict[int, dict] | None = None, most_bytes: int | None = None) -> RankTrace:
    """Read one rank's trace file. RunError with one line where it cannot be read, or was not written by a tracer.

    end_clocks: the nodes' clocks at the end of the run, if known. most_bytes: of a longer file, read only the last
    whole steps that fit.
    """
    try:
        header, records, is_cut = _read_spans(path, most_bytes)
        identity = header["identity"]
        clock = header["clock"]
        end_clock = (end_clocks or {}).get(identity["node"])
        records = from_a_whole_step(records) if is_cut else records
        span_checks.check_records(records, identity["ranks"])
        for name in ("start", "end"):
            records[name] = to_rank_0(records[name], clock, end_clock)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from None
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; run the training again") from None
    # Between the two measurements, the larger of their errors bounds the error of the interpolated offset.
    error_ns = max(clock["error_ns"], end_clock["error_ns"] if end_clock else 0)
    return RankTrace(identity, clock | {"error_ns": error_ns}, records)


def read_counters(path, end_clocks: dict[int, dict], most_bytes: int | None = None) -> NodeCounters:
    """Read one node's counters, as read_trace does. OSError, or ValueError where the file is damaged."""
    header, records, _ = read_records(path, files.COUNTERS, schemas.parse, most_bytes)
    schemas.check_fields("its header", header, COUNTERS_HEADER)
    schemas.check_clock(header.get("clock"))
    span_checks.check_samples(records)
    records["time"] = to_rank_0(records["time"], header["clock"], end_clocks.get(header["node"]))
    return NodeCounters(header["node"], header["host"], header["ports"], records)


def _read_spans(path, most_bytes: int | None) -> tuple[dict, np.ndarray, bool]:
    """Read a trace like read_records. Check its header, and number its phases in the order of NAMES."""
    header, records, is_cut = read_records(path, RECORD, lambda line: _parse_header(path, line), most_bytes)
    if len(records) and not (records["phase"].min() >= 0 and records["phase"].max() < len(header["phases"])):
        raise ValueError("a record names a phase that its header does not list")
    if header["phases"] != list(NAMES):
        records["phase"] = np.array([INDEX[name] for name in header["phases"]], "<i4")[records["phase"]]
    return header, records, is_cut


def _parse_header(path, line: bytes) -> dict:
    """Decode and check the header of a trace."""
    try:
        header = schemas.parse(line)
        is_known = line.endswith(b"\n") and header["format"] == files.TRACE_FORMAT
    except (ValueError, KeyError, TypeError):
        is_known = False
    if not is_known:
        kind = files.TRACE_FORMAT
        raise RunError(f"{path} is not a trace file: its first line is not the header of a {kind}; remove it")
    if header.get("version") != VERSION:
        found = schemas.shown(header.get("version"))
        raise RunError(f"{path} has trace version {found}, expected {VERSION}; read it with the release that wrote it")
    missing = [name for name in ("identity", "phases", "fields", "clock") if name not in header]
    if missing:
        raise ValueError(f"its header lacks {', '.join(missing)}")
    phases = header["phases"] if type(header["phases"]) is list else [header["phases"]]
    unknown = [name for name in phases if type(name) is not str or name not in INDEX]
    if unknown:
        names = ", ".join(name if schemas.NAME.accepts(name) else schemas.shown(name) for name in unknown[:5])
        raise RunError(f"{path} holds phases unknown here: {names}; update this program")
    if len(set(phases)) < len(phases) or header["fields"] != [list(field) for field in RECORD.descr]:
        raise ValueError("its header lists other phases or fields")
    schemas.check_identity(header["identity"])
    schemas.check_clock(header["clock"])
    return header


def to_rank_0(times: np.ndarray, start: dict, end: dict | None) -> np.ndarray:
    """Convert a node's times (int64 ns) to rank 0's clock, with its clocks at the start and, if known, at the end.

    ValueError: the two are not readings of one clock.
    """
    if end is None or "at_ns" not in start or end["at_ns"] == start["at_ns"]:
        return times + start["offset_ns"]
    drift = (end["offset_ns"] - start["offset_ns"]) / (end["at_ns"] - start["at_ns"])
    if end["at_ns"] < start["at_ns"] or abs(drift) > MOST_DRIFT:
        raise ValueError("its clock and the one in clocks.json are not the same node's")
    return times + start["offset_ns"] + np.rint((times - start["at_ns"]) * drift).astype(np.int64)
