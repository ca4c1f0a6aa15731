"""Read a run folder: config.json, log.jsonl and the traces of all ranks and nodes."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from traces.read.run_files import Gaps, read_config, read_log, read_measured_at_end
from traces.read.run_mesh import RunMesh, mesh_of
from traces.read.schemas import PLACE
from traces.read.starts import folder_of, folders_of, number_of, rows_of, starts_of
from traces.read.trace_files import NodeCounters, RankTrace, read_counters, read_trace
from traces.record.files import END_CLOCKS, END_LINKS, RunError, counters_path, trace_path


@dataclass(frozen=True)
class Run:
    """A run folder in memory: config.json, the rows of log.jsonl sorted by step, and the traces by rank.

    counters: of each node that has them. missing: a sentence about each part that a crash or incomplete copy left out.
    end_links: the links by node, measured after the last step. starts: all starts, from starts_of. All other fields
    describe one start, by default the last.
    """

    path: Path
    config: dict
    log: list[dict]
    ranks: list[RankTrace]
    counters: list[NodeCounters] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    end_links: dict[int, dict] = field(default_factory=dict)
    starts: list[dict] = field(default_factory=list)

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
        """{node: host}, sorted by node."""
        return dict(sorted((trace.identity["node"], trace.identity["host"]) for trace in self.ranks))

    @property
    def nodes(self) -> list[int]:
        return list(self.hosts)

    @cached_property
    def links(self) -> dict[int, dict]:
        """The links by node: latency_s, and bytes/s in, out and in both directions at once.

        Each number is the better of two probes, before and after the run: other traffic may make a link look slow, but
        nothing makes it look fast.
        """
        found = {}
        for node, link in self.start_links.items():
            other = self.end_links.get(node, link)
            rates = {name: max(link[name], other[name]) for name in ("in", "out", "both")}
            found[node] = link | rates | {"latency_s": min(link["latency_s"], other["latency_s"])}
        return found

    @property
    def start_links(self) -> dict[int, dict]:
        """The links as probed before the run."""
        return {link["node"]: link for link in self.config.get("links") or []}

    @property
    def clock_error_ns(self) -> int:
        return max(trace.clock["error_ns"] for trace in self.ranks)

    @cached_property
    def mesh(self) -> RunMesh | None:
        """The mesh of ranks that share models; None if each rank has its own model."""
        return mesh_of([trace.identity for trace in self.ranks])

    def places_in(self, *axes: str) -> list[tuple[int, ...]]:
        """Return each rank's place on these axes of run_mesh.AXES; 0 if it has a model of its own."""
        return [tuple(trace.identity.get(axis, 0) for axis in axes) for trace in self.ranks]

    @property
    def label(self) -> str:
        """The strategy's name, and its options that differ from the defaults."""
        settings = self.config["settings"]
        options = {
            "dedicated": settings.get("server") == "dedicated",
            "bfloat16": settings.get("wire") == "bfloat16",
            "int8": settings.get("wire") == "int8",
            "overlap": settings.get("overlap"),
        }
        return " ".join([self.strategy, *(option for option, given in options.items() if given)])


def strategy_name(settings: dict) -> str:
    """Return the strategy's name; the file name where config.json names the user's own file."""
    name = settings["strategy"]
    return Path(name).stem if name.endswith(".py") else name


def read_run(path, allow_missing: bool = False, most_bytes: int | None = None, start: int | None = None) -> Run:
    """Read a run folder. RunError with one line if something is missing or damaged.

    allow_missing: read a run even if parts are missing; RunError only if there is no trace, or if config.json
    is from another run. most_bytes: of longer files, read only the last steps, samples and lines that fit. start: of a
    resumed run, which start, counted from 1; None for the last one.
    """
    path = Path(path)
    gaps = Gaps(allow_missing)
    config = read_config(path, gaps)
    log = read_log(path, gaps, most_bytes)
    starts = starts_of(config, log)
    of_config = path
    folder = path / "traces"
    if start is not None and start != number_of(config):
        of_config = folder = folder_of(path, config, start)
        config = read_config(folder)
        log = rows_of(starts, start, log)
    end_clocks = read_measured_at_end(folder, END_CLOCKS, gaps)
    end_links = read_measured_at_end(folder, END_LINKS, gaps)
    ranks = _read_traces(folder, config, end_clocks, gaps, most_bytes)
    config = config or {"settings": {"strategy": ranks[0].identity.get("strategy", "unknown")}}
    _check_places(of_config / "config.json", config, ranks)
    counters = _read_all_counters(folder, end_clocks, ranks, gaps, most_bytes)
    return Run(path, config, log, ranks, counters, gaps.found, end_links, starts)


def _check_places(path: Path, config: dict, ranks: list[RankTrace]) -> None:
    """Raise RunError if config.json and the traces disagree on the strategy, or on the places of the ranks."""
    places = config.get("ranks")
    strategy = config["settings"]["strategy"]
    for identity in (trace.identity for trace in ranks):
        place = identity
        if places:
            place = places[identity["rank"]] if identity["ranks"] == len(places) else {}
        if identity.get("strategy", strategy) != strategy or any(place.get(name) != identity[name] for name in PLACE):
            raise RunError(
                f"{path} and the trace of rank {identity['rank']} are from different runs, or one is "
                f"damaged: the strategy or the rank's place differs; restore both from one run"
            )


def _read_traces(
    folder: Path, config: dict, end_clocks: dict[int, dict], gaps: Gaps, most_bytes: int | None
) -> list[RankTrace]:
    """Read the traces in rank order. The header of the first one says how many there must be."""
    found = sorted(folder.glob("rank-*.trace"))
    if not found:
        if not any((place / "config.json").exists() for place in (folder, folder.parent)):
            raise RunError(
                f"{folder.parent} has no config.json and no traces, so it is not a run folder; give the folder of --out"
            )
        advice = "train with --trace on (or FROM:TO) to get them"
        if kept := folders_of(folder.parent, config):
            advice = f"an earlier start left some: --start {max(kept)} of diagnose.py, plot.py and export.py reads them"
        raise RunError(f"{folder} holds no rank-*.trace files; {advice}")
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


def _read_all_counters(
    folder: Path, end_clocks: dict[int, dict], ranks: list[RankTrace], gaps: Gaps, most_bytes: int | None
) -> list[NodeCounters]:
    """Read the counters of the nodes that have them. Counters are optional, so missing files are no gap."""
    hosts = {trace.identity["node"]: trace.identity["host"] for trace in ranks}
    counters = []
    for path in sorted(folder.glob("node-*.counters")):
        try:
            one = read_counters(path, end_clocks, most_bytes)
            if path != counters_path(folder, one.node) or hosts.get(one.node, one.host) != one.host:
                raise ValueError(f"its header names node {one.node}, {one.host}")
        except (OSError, ValueError) as error:
            gaps.left_out(path, error)
            continue
        if one.node in hosts:
            counters.append(one)
    return counters
