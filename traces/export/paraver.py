"""Export to Paraver: NAME.prv (records), NAME.pcf (names, colours), NAME.row (rows).

One application, one task a rank with one thread, one CPU a rank; all counted from 1. Times in ns from the run's start.
A phase is a state and an event 90000001; what it exchanges also an MPI collective with Extrae's numbers, so that BSC's
configurations and tools work on it. An exchange of our own appears as the collective of the same meaning, always over
all ranks, with the sizes that the collective would have. Time in no phase is Others inside a step, Idle outside.

Format: Paraver's utils/traceparser, Extrae's src/merger/paraver.
"""

from datetime import datetime
from pathlib import Path

import numpy as np

from traces.export import paraver_labels as labels
from traces.export.line_merge import Lines, text_file, write_merged
from traces.export.spans import RankSpans, Spans, lay_out
from traces.read.runs import Run
from traces.record.phases import NAMES

WORLD = 1  # the communicator of all ranks
# Among records of equal time: what ends comes before what begins, the inner before the outer, or after it.
PHASE_ENDS, STEP_ENDS, RUN_BEGINS, STEP_BEGINS, PHASE_BEGINS, STATE, RATE, RUN_ENDS = range(8)


def export(run: Run, path) -> list[Path]:
    """Write the three files; path: of the .prv (or .prv.gz), or without the ending. Returns their paths."""
    base, prv = _names(Path(path))
    spans = lay_out(run)
    cpus = _number_cpus([rank.place for rank in spans.ranks])
    with text_file(prv) as file:
        file.write(_header(run, spans))
        write_merged(file, _sources(spans, cpus))
    pcf, row = (base.with_name(base.name + ending) for ending in (".pcf", ".row"))
    pcf.write_text(labels.pcf_text(run.label))
    row.write_text(labels.row_text([rank.place for rank in spans.ranks], cpus))
    return [prv, pcf, row]


def _names(path: Path) -> tuple[Path, Path]:
    """The files' common beginning, and the .prv."""
    base = path.with_name(path.name.removesuffix(".gz").removesuffix(".prv"))
    return base, path if path.name.endswith(".prv.gz") else base.with_name(base.name + ".prv")


def _number_cpus(places: list[dict]) -> dict[int, int]:
    """Each rank's CPU: counted over all nodes, one node after another."""
    ranks = sorted((place["node"], place["rank"]) for place in places)
    return {rank: cpu for cpu, (_, rank) in enumerate(ranks, start=1)}


def _header(run: Run, spans: Spans) -> str:
    nodes = [rank.place["node"] for rank in spans.ranks]
    cpus_of_nodes = ",".join(str(nodes.count(node)) for node in sorted(set(nodes)))
    tasks = ",".join(f"1:{node + 1}" for node in nodes)
    members = ":".join(str(task) for task in range(1, len(nodes) + 1))
    return (
        f"#Paraver ({_started(run):%d/%m/%Y at %H:%M}):{spans.end}_ns:{len(set(nodes))}({cpus_of_nodes}):"
        f"1:{len(nodes)}({tasks}),1\nc:1:{WORLD}:{len(nodes)}:{members}\n"
    )


def _started(run: Run) -> datetime:
    if "started" in run.config:
        return datetime.fromisoformat(run.config["started"])
    return datetime.fromtimestamp(run.path.stat().st_mtime)


def _sources(spans: Spans, cpus: dict[int, int]) -> list[Lines]:
    sources = []
    leaders = {}
    for rank in spans.ranks:
        number = rank.place["rank"]
        who = f"{cpus[number]}:1:{number + 1}:1"
        leaders.setdefault(rank.place["node"], who)
        sources += [*_life(who, spans.end), *_states(who, rank, spans.end), *_steps(who, rank.steps)]
        sources += _phases(who, rank, len(spans.ranks))
    for node, rates in spans.rates.items():
        types = (labels.RATE_IN, labels.RATE_OUT, labels.RATE_STALLED)
        values = tuple(rates[name] for name in ("time", "in", "out", "stalled"))
        sources.append(Lines(rates["time"], RATE, [_event(leaders[node], *types)], values))
    return sources


def _event(who: str, *types: int, fixed: str = "") -> str:
    """The template of an event line: its time and a value for each type are to be filled in; `fixed` follows."""
    return f"2:{who}:%d" + "".join(f":{number}:%d" for number in types) + f"{fixed}\n"


def _life(who: str, end: int) -> list[Lines]:
    template = [_event(who, labels.APPLICATION, labels.STRATEGY)]
    return [
        Lines(np.array([time]), order, template, (np.array([time]), np.array([value]), np.array([value])))
        for time, order, value in ((0, RUN_BEGINS, 1), (end, RUN_ENDS, 0))
    ]


def _steps(who: str, steps: np.ndarray) -> list[Lines]:
    template = [_event(who, labels.STEP_NUMBER)]
    return [
        Lines(steps["start"], STEP_BEGINS, template, (steps["start"], steps["step"])),
        Lines(steps["end"], STEP_ENDS, template, (steps["end"], np.zeros(len(steps), int))),
    ]


def _states(who: str, rank: RankSpans, end: int) -> list[Lines]:
    phases = rank.phases
    states = [f"1:{who}:%d:%d:{labels.STATE_OF.get(name, labels.OTHERS)}\n" for name in NAMES]
    start, stop, in_step = _gaps(rank, end)
    gaps = [f"1:{who}:%d:%d:{state}\n" for state in (labels.IDLE, labels.OTHERS)]
    return [
        Lines(phases["start"], STATE, states, (phases["start"], phases["end"]), phases["phase"]),
        Lines(start, STATE, gaps, (start, stop), in_step),
    ]


def _gaps(rank: RankSpans, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and end of what is in no phase, from 0 to `end`, cut at the edges of steps; and whether it is in a step."""
    edges = np.unique(np.concatenate([[0, end], *(one[name] for one in (rank.phases, rank.steps)
                                                  for name in ("start", "end"))]))  # fmt: skip
    start, stop = edges[:-1], edges[1:]
    empty = ~_inside(start, rank.phases)
    return start[empty], stop[empty], _inside(start[empty], rank.steps).astype(np.int64)


def _inside(times: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Which times lie in one of the spans: at its start or later, before its end."""
    ends = np.append(spans["end"], 0)  # the last one is what index -1 finds: of times before the first span
    return ends[np.searchsorted(spans["start"], times, side="right") - 1] > times


def _phases(who: str, rank: RankSpans, ranks: int) -> list[Lines]:
    """Entries and exits of phases, with the MPI collective where a phase is one."""
    names = [NAMES[phase] for phase in range(len(NAMES))]
    is_mpi = np.array([(name, False) in labels.COLLECTIVE_OF for name in names])[rank.phases["phase"]]
    plain, mpi = rank.phases[~is_mpi], rank.phases[is_mpi]
    enter = [_event(who, fixed=f":{labels.PHASE}:{phase + 1}") for phase in range(len(NAMES))]
    leave = [_event(who, fixed=f":{labels.PHASE}:0")]
    leave_mpi = [_event(who, fixed=f":{labels.COLLECTIVE}:0:{labels.PHASE}:0:{labels.WAITED}:0")]
    return [
        Lines(plain["start"], PHASE_BEGINS, enter, (plain["start"],), plain["phase"]),
        Lines(plain["end"], PHASE_ENDS, leave, (plain["end"],)),
        _mpi_entries(who, rank.place["rank"], mpi, ranks),
        Lines(mpi["end"], PHASE_ENDS, leave_mpi, (mpi["end"],)),
    ]


def _mpi_entries(who: str, rank: int, calls: np.ndarray, ranks: int) -> Lines:
    """One template for each kind of call: the phase, whether it has a root, whether this rank is it."""
    has_root, is_root = calls["root"] >= 0, calls["root"] == rank
    kinds, which = np.unique(np.stack([calls["phase"], has_root, is_root], axis=1), axis=0, return_inverse=True)
    sent, received, templates = np.zeros(len(calls), np.int64), np.zeros(len(calls), np.int64), []
    for kind, (phase, with_root, at_root) in enumerate(kinds.tolist()):
        collective = labels.COLLECTIVE_OF[NAMES[phase], bool(with_root)]
        these = which.ravel() == kind
        sent[these] = _part(collective.sends, calls["bytes"][these], at_root, ranks)
        received[these] = _part(collective.receives, calls["bytes"][these], at_root, ranks)
        root = f":{labels.ROOT}:1" if at_root else ""
        templates.append(
            f"2:{who}:%d:{labels.COLLECTIVE}:{collective.value}:{labels.SEND_SIZE}:%d:{labels.RECEIVE_SIZE}:%d:"
            f"{labels.COMMUNICATOR}:{WORLD}{root}:{labels.PHASE}:{phase + 1}:{labels.WAITED}:%d\n"
        )
    return Lines(
        calls["start"], PHASE_BEGINS, templates, (calls["start"], sent, received, calls["waited"]), which.ravel()
    )


def _part(rule: str, sizes: np.ndarray, at_root: int, ranks: int) -> np.ndarray:
    whole = {"none": False, "all": True, "share": True, "root": bool(at_root), "others": not at_root}[rule]
    return sizes * whole // (ranks if rule == "share" else 1)
