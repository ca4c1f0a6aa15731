"""Export to Paraver: NAME.prv (records), NAME.pcf (names, colours), NAME.row (rows).

The run is one application, a rank is a task with one thread on a CPU of its own; all are counted from 1. Times are
nanoseconds from the run's start. A phase is a state and an event 90000001. An exchange is also the corresponding MPI
collective, with Extrae's numbers, over the ranks that take part and with the collective's sizes, so that BSC's
configurations and tools work. Messages between stages and the synchronization of replicated parameters (lend,
borrow) are states and phases only. Time outside all phases is Others within a step, else Idle.

Format: Paraver's utils/traceparser, Extrae's src/merger/paraver. Numbers and names of MPI's events: Extrae's
src/tracer/wrappers/MPI/mpi_events, MPI_EventEncoding.h and src/merger/paraver/labels.c.
"""

from datetime import datetime
from pathlib import Path

import numpy as np

from traces.export import collectives as mpi
from traces.export.line_merge import Lines, text_file, write_merged
from traces.export.spans import WORLD, Communicators, RankSpans, Spans, communicators, lay_out
from traces.read.runs import Run
from traces.record.phases import COMPUTE, COPY, EXCHANGE, NAMES, PHASES, PIPELINE

# The order of simultaneous records.
PHASE_ENDS, STEP_ENDS, RUN_BEGINS, STEP_BEGINS, PHASE_BEGINS, STATE, RATE, RUN_ENDS = range(8)

# Types of events: Extrae's for MPI, our own from 90000000 on.
APPLICATION = 40000001
COLLECTIVE = 50000002
SEND_SIZE = 50100001
RECEIVE_SIZE = 50100002
ROOT = 50100003
COMMUNICATOR = 50100004
PHASE = 90000001
STEP_NUMBER = 90000002
STRATEGY = 90000003
RATE_IN = 90000010
RATE_OUT = 90000011
RATE_STALLED = 90000012
WAITED = 90000020

IDLE = 0
RUNNING = 1
WAITING = 3
SYNCHRONIZATION = 5
IMMEDIATE_SEND = 10
INPUT_OUTPUT = 12
GROUP_COMMUNICATION = 13
OTHERS = 15
MEMORY_TRANSFER = 17
# Extrae's names and colours.
STATES = {
    IDLE: ("Idle", (117, 195, 255)),
    RUNNING: ("Running", (0, 0, 255)),
    WAITING: ("Waiting a message", (255, 0, 0)),
    SYNCHRONIZATION: ("Synchronization", (179, 0, 0)),
    IMMEDIATE_SEND: ("Immediate Send", (59, 0, 117)),
    INPUT_OUTPUT: ("I/O", (172, 174, 41)),
    GROUP_COMMUNICATION: ("Group Communication", (255, 144, 26)),
    OTHERS: ("Others", (119, 119, 119)),
    MEMORY_TRANSFER: ("Memory transfer", (255, 0, 96)),
}
# BSC's configurations and POP metrics count Running as useful.
STATE_OF = dict.fromkeys((*COMPUTE, "eval"), RUNNING) | dict.fromkeys(EXCHANGE, GROUP_COMMUNICATION)
STATE_OF |= dict.fromkeys(COPY, MEMORY_TRANSFER) | dict.fromkeys(("data", "checkpoint"), INPUT_OUTPUT)
STATE_OF |= dict(zip(PIPELINE, (IMMEDIATE_SEND, WAITING), strict=True)) | {"wait": SYNCHRONIZATION}

_OPTIONS = """DEFAULT_OPTIONS

LEVEL               THREAD
UNITS               NANOSEC
LOOK_BACK           100
SPEED               1
FLAG_ICONS          ENABLED
NUM_OF_STATE_COLORS 1000
YMAX_SCALE          37

DEFAULT_SEMANTIC

THREAD_FUNC         State As Is
"""


def export(run: Run, path) -> list[Path]:
    """Write the three files, and return their paths. path: the .prv or .prv.gz file, or its name without the ending."""
    path = Path(path)
    base = path.with_name(path.name.removesuffix(".gz").removesuffix(".prv"))
    prv = path if path.name.endswith(".prv.gz") else base.with_name(base.name + ".prv")
    spans = lay_out(run)
    groups = communicators(run)
    # CPUs are counted over all nodes, one node after another.
    by_node = sorted((rank.place["node"], rank.place["rank"]) for rank in spans.ranks)
    cpus = {rank: cpu for cpu, (_, rank) in enumerate(by_node, start=1)}
    with text_file(prv) as file:
        file.write(_header(run, spans, groups))
        write_merged(file, _sources(spans, cpus, groups))
    pcf = base.with_name(f"{base.name}.pcf")
    row = base.with_name(f"{base.name}.row")
    pcf.write_text(pcf_text(run.label))
    row.write_text(row_text([rank.place for rank in spans.ranks], cpus))
    return [prv, pcf, row]


def _header(run: Run, spans: Spans, groups: Communicators) -> str:
    nodes = [rank.place["node"] for rank in spans.ranks]
    cpus_of_nodes = ",".join(str(nodes.count(node)) for node in sorted(set(nodes)))
    tasks = ",".join(f"1:{node + 1}" for node in nodes)
    lines = "".join(
        f"c:1:{number}:{len(ranks)}:{':'.join(str(rank + 1) for rank in ranks)}\n"
        for number, ranks in enumerate(groups.members, start=WORLD)
    )
    started = datetime.fromisoformat(run.config.get("started", "1970-01-01T00:00:00"))
    return (
        f"#Paraver ({started:%d/%m/%Y at %H:%M}):{spans.end}_ns:{len(set(nodes))}({cpus_of_nodes}):"
        f"1:{len(nodes)}({tasks}),{len(groups.members)}\n{lines}"
    )


def _sources(spans: Spans, cpus: dict[int, int], groups: Communicators) -> list[Lines]:
    sources = []
    leaders = {}
    for rank in spans.ranks:
        number = rank.place["rank"]
        who = f"{cpus[number]}:1:{number + 1}:1"
        leaders.setdefault(rank.place["node"], who)
        sources += [*_life(who, spans.end), *_states(who, rank, spans.end), *_steps(who, rank.steps)]
        sources += _phases(who, rank, groups)
    for node, (_, rates) in spans.counted.items():
        types = (RATE_IN, RATE_OUT, RATE_STALLED)
        values = tuple(rates[name] for name in ("time", "in", "out", "stalled"))
        sources.append(Lines(rates["time"], RATE, [_event(leaders[node], *types)], values))
    return sources


def _event(who: str, *types: int, fixed: str = "") -> str:
    """Return an event line's template, with placeholders for time and values. fixed: text after these."""
    return f"2:{who}:%d" + "".join(f":{number}:%d" for number in types) + f"{fixed}\n"


def _life(who: str, end: int) -> list[Lines]:
    template = [_event(who, APPLICATION, STRATEGY)]
    return [
        Lines(np.array([time]), order, template, (np.array([time]), np.array([value]), np.array([value])))
        for time, order, value in ((0, RUN_BEGINS, 1), (end, RUN_ENDS, 0))
    ]


def _steps(who: str, steps: np.ndarray) -> list[Lines]:
    template = [_event(who, STEP_NUMBER)]
    return [
        Lines(steps["start"], STEP_BEGINS, template, (steps["start"], steps["step"])),
        Lines(steps["end"], STEP_ENDS, template, (steps["end"], np.zeros(len(steps), int))),
    ]


def _states(who: str, rank: RankSpans, end: int) -> list[Lines]:
    phases = rank.phases
    states = [f"1:{who}:%d:%d:{STATE_OF.get(name, OTHERS)}\n" for name in NAMES]
    start, stop, in_step = _gaps(rank, end)
    gaps = [f"1:{who}:%d:%d:{state}\n" for state in (IDLE, OTHERS)]
    return [
        Lines(phases["start"], STATE, states, (phases["start"], phases["end"]), phases["phase"]),
        Lines(start, STATE, gaps, (start, stop), in_step),
    ]


def _gaps(rank: RankSpans, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (start, end, whether in a step) of the time outside all phases up to `end`, cut at steps' edges."""
    inner = [spans[edge] for spans in (rank.phases, rank.steps) for edge in ("start", "end")]
    edges = np.unique(np.concatenate([[0, end], *inner]))
    start = edges[:-1]
    stop = edges[1:]
    empty = ~_inside(start, rank.phases)
    return start[empty], stop[empty], _inside(start[empty], rank.steps).astype(np.int64)


def _inside(times: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return whether each time lies in one of the spans, which include their start but not their end."""
    ends = np.append(spans["end"], 0)  # times before the first span find the last entry, by index -1
    return ends[np.searchsorted(spans["start"], times, side="right") - 1] > times


def _phases(who: str, rank: RankSpans, groups: Communicators) -> list[Lines]:
    """Return the beginnings and ends of phases, with the MPI collectives."""
    is_mpi = np.array([name in mpi.COLLECTIVE_OF for name in NAMES])[rank.phases["phase"]]
    plain = rank.phases[~is_mpi]
    collectives = rank.phases[is_mpi]
    enter = [_event(who, fixed=f":{PHASE}:{phase + 1}") for phase in range(len(NAMES))]
    leave = [_event(who, fixed=f":{PHASE}:0")]
    leave_mpi = [_event(who, fixed=f":{COLLECTIVE}:0:{PHASE}:0:{WAITED}:0")]
    return [
        Lines(plain["start"], PHASE_BEGINS, enter, (plain["start"],), plain["phase"]),
        Lines(plain["end"], PHASE_ENDS, leave, (plain["end"],)),
        _mpi_entries(who, rank.place["rank"], collectives, groups),
        Lines(collectives["end"], PHASE_ENDS, leave_mpi, (collectives["end"],)),
    ]


def _mpi_entries(who: str, rank: int, calls: np.ndarray, groups: Communicators) -> Lines:
    """Make a template for each kind of call: its phase, whether it has a root, and whether this rank is the root."""
    has_root = calls["root"] >= 0
    is_root = calls["root"] == rank
    kinds, which = np.unique(np.stack([calls["phase"], has_root, is_root], axis=1), axis=0, return_inverse=True)
    sent = np.zeros(len(calls), np.int64)
    received = np.zeros(len(calls), np.int64)
    templates = []
    for kind, (phase, with_root, at_root) in enumerate(kinds.tolist()):
        collective = mpi.COLLECTIVE_OF[NAMES[phase]][with_root]
        communicator = int(groups.of[rank][phase])
        ranks = len(groups.members[communicator - WORLD])
        these = which.ravel() == kind
        sent[these], received[these] = collective.sizes(calls["bytes"][these], at_root, ranks)
        root = f":{ROOT}:1" if at_root else ""
        templates.append(
            f"2:{who}:%d:{COLLECTIVE}:{collective.number}:{SEND_SIZE}:%d:{RECEIVE_SIZE}:%d:"
            f"{COMMUNICATOR}:{communicator}{root}:{PHASE}:{phase + 1}:{WAITED}:%d\n"
        )
    return Lines(
        calls["start"], PHASE_BEGINS, templates, (calls["start"], sent, received, calls["waited"]), which.ravel()
    )


def pcf_text(strategy: str) -> str:
    """Return the .pcf: names and colours of states, types and values. strategy: the run's label."""
    states = "".join(f"{number}    {label}\n" for number, (label, _) in STATES.items())
    colours = "".join(f"{number}    {{{','.join(map(str, colour))}}}\n" for number, (_, colour) in STATES.items())
    collectives = {one.number: one.label for one in mpi.COLLECTIVES}
    types = [
        _event_type({APPLICATION: "Application"}, {0: "End", 1: "Begin"}),
        _event_type({COLLECTIVE: "MPI Collective Comm"}, {0: "Outside MPI"} | collectives),
        _event_type({SEND_SIZE: "Send Size in MPI Global OP", RECEIVE_SIZE: "Recv Size in MPI Global OP"}),
        _event_type({ROOT: "Root in MPI Global OP", COMMUNICATOR: "Communicator in MPI Global OP"}),
        _event_type({PHASE: "Training phase"}, {0: "End"} | dict(enumerate(PHASES, start=1))),
        _event_type({STEP_NUMBER: "Step"}),
        _event_type({STRATEGY: "Exchange strategy"}, {0: "End", 1: strategy}),
        _event_type({RATE_IN: "Node's ports in (bytes/s)", RATE_OUT: "Node's ports out (bytes/s)"}),
        _event_type({RATE_STALLED: "Node's ports stalled (port_xmit_wait ticks/s)"}),
        _event_type({WAITED: "Waiting for another rank in this exchange (ns)"}),
    ]
    return f"{_OPTIONS}\nSTATES\n{states}\nSTATES_COLOR\n{colours}\n" + "\n".join(types)


def _event_type(types: dict[int, str], values: dict[int, str] | None = None) -> str:
    lines = ["EVENT_TYPE", *(f"6    {number}    {label}" for number, label in types.items())]
    if values:
        lines += ["VALUES", *(f"{number}    {label}" for number, label in values.items())]
    return "\n".join(lines) + "\n"


def row_text(places: list[dict], cpus: dict[int, int]) -> str:
    """Return the .row: names of CPUs, nodes, ranks and threads. cpus: {rank: CPU}, counted from 1.

    CPUs come first: BSC's BasicAnalysis takes the number of processes from the first line.
    """
    by_cpu = sorted(places, key=lambda place: cpus[place["rank"]])
    hosts = {place["node"]: place["host"] for place in by_cpu}
    levels = {
        "CPU": [f"{cpus[place['rank']]}.{place['host']}" for place in by_cpu],
        "NODE": list(hosts.values()),
        "TASK": [f"{place['title']} @ {place['host']}" for place in places],
        "THREAD": [f"THREAD 1.{place['rank'] + 1}.1" for place in places],
    }
    parts = ["\n".join([f"LEVEL {level} SIZE {len(names)}", *names, ""]) for level, names in levels.items()]
    return "\n".join(parts)
