"""The run folder: config.json, log.jsonl and the traces of all ranks and nodes, read back."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from traces.read import checks
from traces.read.checks import PLACE
from traces.read.mesh import Mesh, mesh_of
from traces.read.tails import read_lines
from traces.read.trace_files import NodeCounters, RankTrace, read_at_end, read_calls, read_counters, read_trace
from traces.record.files import END_CLOCKS, END_LINKS, RunError, calls_path, counters_path, trace_path


@dataclass(frozen=True)
class Run:
    """A run folder in memory: config.json, the lines of log.jsonl ordered by step, one RankTrace per rank.

    counters: one NodeCounters for each node that has them; missing: what a crash or a copy left out, a sentence each;
    end_links: the links by node as measured after the last step, of a run that came to its end.
    """

    path: Path
    config: dict
    log: list[dict]
    ranks: list[RankTrace]
    counters: list[NodeCounters] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    end_links: dict[int, dict] = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        return strategy_name(self.config["settings"])

    @cached_property
    def rank_numbers(self) -> list[int]:
        return [trace.identity["rank"] for trace in self.ranks]

    @cached_property
    def rank_nodes(self) -> list[int]:
        return [trace.identity["node"] for trace in self.ranks]

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Each node's host, by rising node."""
        return dict(sorted((trace.identity["node"], trace.identity["host"]) for trace in self.ranks))

    @property
    def nodes(self) -> list[int]:
        return list(self.hosts)

    @cached_property
    def links(self) -> dict[int, dict]:
        """The links by node: latency_s, and bytes/s in, out and both ways at once.

        Each number is the better one of before the run and after it: what else goes on while a link is probed makes it
        look slow, and nothing makes it look fast.
        """
        return better_links(self.start_links, self.end_links)

    @property
    def start_links(self) -> dict[int, dict]:
        """As `links`, before the run."""
        return {link["node"]: link for link in self.config.get("links") or []}

    @property
    def clock_error_ns(self) -> int:
        return max(trace.clock["error_ns"] for trace in self.ranks)

    @cached_property
    def mesh(self) -> Mesh | None:
        """How the ranks share models; None where each has its own."""
        return mesh_of([trace.identity for trace in self.ranks])

    def places_in(self, *axes: str) -> list[tuple[int, ...]]:
        """Of each rank, its numbers on these axes of the mesh: "copy", "part", "stage"; 0 without a cut."""
        return [tuple(trace.identity.get(axis, 0) for axis in axes) for trace in self.ranks]

    @property
    def label(self) -> str:
        return label_of(self.config["settings"])


def better_links(start: dict[int, dict], end: dict[int, dict]) -> dict[int, dict]:
    """`Run.links`, from the links by node before the run and after it; a node that has no link at the end keeps its."""
    return {node: _better(link, end.get(node, link)) for node, link in start.items()}


def _better(link: dict, other: dict) -> dict:
    rates = {name: max(link[name], other[name]) for name in ("in", "out", "both")}
    return link | rates | {"latency_s": min(link["latency_s"], other["latency_s"])}


def read_links(path, config: dict) -> list[dict]:
    """`Run.links`, of a run that need not have been traced. config: its config.json."""
    end = _read_at_end(Path(path) / "traces", END_LINKS, _Gaps(True))
    return list(better_links({link["node"]: link for link in config.get("links") or []}, end).values())


def strategy_name(settings: dict) -> str:
    """A strategy of the user's own is its file in config.json, and has the file's name."""
    name = settings["strategy"]
    return Path(name).stem if name.endswith(".py") else name


def label_of(settings: dict) -> str:
    """The strategy's name, with those of its options that were not the default. settings: config.json's."""
    options = {
        "dedicated": settings.get("server") == "dedicated",
        "bfloat16": settings.get("wire") == "bfloat16",
        "overlap": settings.get("overlap"),
    }
    return " ".join([strategy_name(settings), *(option for option, given in options.items() if given)])


class _Gaps:
    """What to do where a part of a run is missing: end with a RunError or, if that is allowed, keep it in `found`."""

    def __init__(self, allowed: bool):
        self.allowed, self.found = allowed, []

    def add(self, problem: str) -> None:
        if not self.allowed:
            raise RunError(problem)
        self.found.append(problem)

    def left_out(self, path: Path, error: Exception) -> None:
        """For a file that a run can do without: say that it was not used."""
        self.found.append(f"{path} is damaged and left out: {error}")


def read_run(path, allow_missing: bool = False, most_bytes: int | None = None) -> Run:
    """Read a run folder; RunError with one line where something is missing or broken.

    allow_missing: read what there is of a run that crashed or was copied in part. RunError then only if no trace is
    left at all, or config.json is another run's. most_bytes: of a longer file that grows only a part is read, in so
    many bytes: the last steps of traces and counters, and of the log lines from all of it (tails.py).
    """
    path, gaps = Path(path), _Gaps(allow_missing)
    config, log = read_config(path, gaps), _read_log(path, gaps, most_bytes)
    end_clocks, end_links = (_read_at_end(path / "traces", name, gaps) for name in (END_CLOCKS, END_LINKS))
    ranks = _read_traces(path / "traces", end_clocks, gaps, most_bytes)
    ranks = [_with_calls(path / "traces", trace, end_clocks, gaps, most_bytes) for trace in ranks]
    config = config or {"settings": {"strategy": ranks[0].identity.get("strategy", "unknown")}}
    _check_places(path, config, ranks)
    counters = _read_all_counters(path / "traces", end_clocks, ranks, gaps, most_bytes)
    return Run(path, config, log, ranks, counters, gaps.found, end_links)


def read_log(path, allow_missing: bool = False, most_bytes: int | None = None) -> list[dict]:
    """The rows of log.jsonl by step, of a run that need not have been traced. RunError with one line.

    allow_missing: without a log there are no rows, and damaged lines are left out. most_bytes: as read_run's.
    """
    return _read_log(Path(path), _Gaps(allow_missing), most_bytes)


def _check_places(path: Path, config: dict, ranks: list[RankTrace]) -> None:
    """RunError where config.json names another strategy, or seats the ranks otherwise, than their traces do."""
    places, strategy = config.get("ranks"), config["settings"]["strategy"]
    for identity in (trace.identity for trace in ranks):
        place = identity
        if places:
            place = places[identity["rank"]] if identity["ranks"] == len(places) else {}
        if identity.get("strategy", strategy) != strategy or any(place.get(name) != identity[name] for name in PLACE):
            raise RunError(
                f"{path / 'config.json'} and the trace of rank {identity['rank']} are from different runs, or one is "
                f"damaged: strategy, or where the rank sat, is another; restore both from one run"
            )


def _read_at_end(folder: Path, name: str, gaps: _Gaps) -> dict[int, dict]:
    try:
        return read_at_end(folder, name)
    except (OSError, ValueError) as error:
        gaps.left_out(folder / name, error)
        return {}


def _read_traces(folder: Path, end_clocks: dict[int, dict], gaps: _Gaps, most_bytes: int | None) -> list[RankTrace]:
    """The traces in rank order. The header of the first one says how many there must be."""
    found = sorted(folder.glob("rank-*.trace"))
    if not found:
        if not (folder.parent / "config.json").exists():
            raise RunError(
                f"{folder.parent} has no config.json and no traces, so it is no run folder; give what --out named"
            )
        raise RunError(f"{folder} holds no rank-*.trace files; train with --trace on (or FROM:TO) to get them")
    traces = {}
    for path in found:
        try:
            traces[path] = read_trace(path, end_clocks, most_bytes)
        except RunError as error:
            gaps.add(str(error))
    if not traces:
        raise RunError(gaps.found[-1])
    first, ranks = next((path, trace.identity["ranks"]) for path, trace in traces.items())
    for path, trace in list(traces.items()):
        if trace.identity["ranks"] != ranks or path != trace_path(folder, trace.identity["rank"]):
            gaps.add(
                f"{path} is from another run (rank {trace.identity['rank']} of {trace.identity['ranks']}, "
                f"{first.name} says {ranks} ranks); remove it"
            )
            del traces[path]
    missing = sorted({trace_path(folder, rank) for rank in range(ranks)} - set(found))
    if missing:
        names = ", ".join(path.name for path in missing[:3])
        gaps.add(
            f"{folder} lacks {len(missing)} of {ranks} ranks' files ({names}{', ...' if missing[3:] else ''}); "
            f"copy them from the nodes, or put --out on a file system that all nodes share"
        )
    return list(traces.values())


def _with_calls(folder: Path, trace: RankTrace, end_clocks: dict[int, dict], gaps: _Gaps, most_bytes) -> RankTrace:
    """The trace with its rank's calls, where there is a file of them."""
    path = calls_path(folder, trace.identity["rank"])
    if not path.exists():
        return trace
    try:
        identity, calls = read_calls(path, end_clocks, most_bytes)
        if identity != trace.identity:
            raise ValueError("another rank or another run wrote it")
    except (OSError, ValueError) as error:
        gaps.left_out(path, error)
        return trace
    return replace(trace, calls=calls)


def _read_all_counters(
    folder: Path, end_clocks: dict[int, dict], ranks: list[RankTrace], gaps: _Gaps, most_bytes: int | None
) -> list[NodeCounters]:
    """The counters of the nodes that have them. Nothing is said where there are none: a run needs none."""
    hosts = {trace.identity["node"]: trace.identity["host"] for trace in ranks}
    counters = []
    for path in sorted(folder.glob("node-*.counters")):
        try:
            one = read_counters(path, end_clocks, most_bytes)
            if path != counters_path(folder, one.node) or hosts.get(one.node, one.host) != one.host:
                raise ValueError(f"it says that it is of node {one.node}, {one.host}")
        except (OSError, ValueError) as error:
            gaps.left_out(path, error)
            continue
        if one.node in hosts:
            counters.append(one)
    return counters


def read_config(path, gaps: _Gaps | None = None) -> dict:
    """config.json of a run folder, checked (checks.check_config says what holds). RunError with one line.

    {} where it is missing or damaged and `gaps` allows that. What is no folder is never allowed.
    """
    folder, gaps = Path(path), gaps or _Gaps(allowed=False)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give the folder that scripts/train.py --out wrote")
    path = folder / "config.json"
    try:
        config = checks.parse(checks.read_bytes(path))
        checks.check_config(config)
        return config
    except FileNotFoundError:
        gaps.add(f"{path} is missing, so {folder} is not a run folder; give what --out named")
    except (OSError, ValueError) as error:
        gaps.add(f"{path} is not what scripts/train.py writes (JSON with settings.strategy): {error}; restore it")
    return {}


def _read_log(folder: Path, gaps: _Gaps, most_bytes: int | None = None) -> list[dict]:
    """The log's lines by step. A torn last line is dropped; of a step written twice (--resume) the later one counts.

    What is null as it is no number any more becomes nan.
    """
    path = folder / "log.jsonl"
    try:
        lines = read_lines(path, most_bytes)
    except FileNotFoundError:
        gaps.add(f"{path} is missing; a training run writes it from its first step on")
        return []
    except OSError as error:
        gaps.add(f"{path} cannot be read ({error.strerror}); check its permissions and the disk")
        return []
    rows = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = checks.parse(line)
            checks.check_fields("it", row, {"step": checks.STEP_NUMBER}, checks.LOG_ROW)
            rows[row["step"]] = row | {name: math.nan for name in checks.DIVERGING if row.get(name, 0) is None}
        except ValueError as error:
            gaps.add(f"{path}, line {number}, is not a JSON object with a step: {error}; remove the line")
    return [rows[step] for step in sorted(rows)]
