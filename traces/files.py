"""Trace files and the run folder around them.

RUN/traces/rank-00000.trace, one file per rank: a line of JSON, "\\n", then records of 36 bytes until the end.

The line holds `format` and `version`; `identity` (rank, ranks, node, host, local_rank, strategy); `phases`, the names
that a record's `phase` counts into; `fields`, the record's layout as NumPy writes it; and `clock`: `offset_ns`,
nanoseconds to add to this rank's times to get rank 0's clock, and `error_ns`, the bound of that offset's error.

A record is `RECORD`, little-endian without padding. A last record cut short by a crash is dropped.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traces.phases import INDEX, NAMES

FORMAT = "gpt2-mpi trace"
VERSION = 1
IDENTITY_NAMES = ("rank", "ranks", "node", "host")
HEADER_NAMES = ("identity", "phases", "clock")

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


@dataclass(frozen=True)
class Run:
    """A run folder in memory: config.json, the lines of log.jsonl ordered by step, one RankTrace per rank."""

    path: Path
    config: dict
    log: list[dict]
    ranks: list[RankTrace]

    @property
    def strategy(self) -> str:
        return self.config["settings"]["strategy"]

    @property
    def label(self) -> str:
        """The strategy's name, with those of its options that were not the default."""
        settings = self.config["settings"]
        options = {
            "dedicated": self.strategy == "reduce-bcast" and settings.get("server") == "dedicated",
            "bfloat16": settings.get("wire") == "bfloat16",
            "overlap": settings.get("overlap"),
        }
        return " ".join([self.strategy, *(option for option, given in options.items() if given)])


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
    """Remove the files of ranks that this run does not have: an earlier run in the same folder had more."""
    for path in folder.glob("rank-*.trace"):
        if path.stem.removeprefix("rank-").isdecimal() and int(path.stem.removeprefix("rank-")) >= ranks:
            path.unlink()


def append(file, data) -> None:
    """Write bytes or an array of RECORD, and hand them to the operating system at once."""
    file.write(data)
    file.flush()


def read_run(path) -> Run:
    """Read a run folder; RunError with one line where something is missing or broken."""
    path = Path(path)
    if not path.is_dir():
        raise RunError(f"{path} is not a folder; give the folder that scripts/train.py --out wrote")
    config = _read_config(path / "config.json")
    return Run(path, config, _read_log(path / "log.jsonl"), _read_traces(path / "traces"))


def read_trace(path) -> RankTrace:
    """Read one rank's trace file."""
    with open(path, "rb") as file:
        header = _parse_header(path, file.readline(1 << 20))
        size = file.seek(0, 2)
        start = header["length"]
        records = np.fromfile(path, RECORD, count=(size - start) // RECORD.itemsize, offset=start)
    if len(records) and not (records["phase"].min() >= 0 and records["phase"].max() < len(header["phases"])):
        raise RunError(
            f"{path} is damaged: a record names a phase that its header does not list; run the training again"
        )
    if header["phases"] != list(NAMES):
        records["phase"] = np.array([INDEX[name] for name in header["phases"]])[records["phase"]]
    records["start"] += header["clock"]["offset_ns"]
    records["end"] += header["clock"]["offset_ns"]
    return RankTrace(header["identity"], header["clock"], records)


def _parse_header(path, line: bytes) -> dict:
    """The checked header of a trace file, with its length in bytes added."""
    try:
        header = json.loads(line)
        is_trace = header["format"] == FORMAT
    except (ValueError, KeyError, TypeError):
        is_trace = False
    if not is_trace:
        raise RunError(f"{path} is not a trace file: its first line is not the header of a {FORMAT}; remove it")
    if header["version"] != VERSION:
        raise RunError(
            f"{path} has trace version {header['version']}, this program reads {VERSION}; update the older one"
        )
    missing = [name for name in HEADER_NAMES if name not in header] or [
        name for name in IDENTITY_NAMES if name not in header["identity"]
    ]
    if missing:
        raise RunError(f"{path} is damaged: its header lacks {', '.join(missing)}; run the training again")
    unknown = [name for name in header["phases"] if name not in INDEX]
    if unknown:
        raise RunError(f"{path} holds phases unknown here: {', '.join(unknown)}; update this program")
    return header | {"length": len(line)}


def _read_traces(folder: Path) -> list[RankTrace]:
    """All ranks' traces in rank order, from the files that rank 0's header says there must be."""
    found = sorted(folder.glob("rank-*.trace"))
    if not found:
        raise RunError(f"{folder} holds no rank-*.trace files; train with --trace on (or FROM:TO) to get them")
    traces = [read_trace(path) for path in found]
    ranks = traces[0].identity["ranks"]
    for path, trace in zip(found, traces, strict=True):
        if trace.identity["ranks"] != ranks or path != trace_path(folder, trace.identity["rank"]):
            raise RunError(
                f"{path} is from another run (rank {trace.identity['rank']} of {trace.identity['ranks']}, "
                f"{found[0].name} says {ranks} ranks); remove it"
            )
    missing = [rank for rank in range(ranks) if trace_path(folder, rank) not in found]
    if missing:
        names = ", ".join(trace_path(folder, rank).name for rank in missing[:3])
        raise RunError(
            f"{folder} lacks {len(missing)} of {ranks} ranks' files ({names}{', ...' if missing[3:] else ''}); "
            f"copy them from the nodes, or put --out on a file system that all nodes share"
        )
    return traces


def _read_config(path: Path) -> dict:
    try:
        config = json.loads(path.read_text())
        config["settings"]["strategy"]
    except FileNotFoundError:
        raise RunError(f"{path} is missing, so {path.parent} is not a run folder; give what --out named") from None
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"{path} is not what scripts/train.py writes (JSON with settings.strategy); restore it"
        ) from None
    return config


def _read_log(path: Path) -> list[dict]:
    """The log's lines by step. A torn last line is dropped; of a step written twice (--resume) the later one counts."""
    if not path.is_file():
        raise RunError(f"{path} is missing; a training run writes it from its first step on")
    lines = path.read_text().split("\n")
    rows = {}
    # What follows the last newline is empty, or torn by a crash.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{path}, line {number}, is not a JSON object with a step; remove the line") from None
    return [rows[step] for step in sorted(rows)]
