"""Numbers and names in Paraver traces: Extrae's for MPI, so that BSC's configurations work, our own beside them.

Extrae: src/tracer/wrappers/MPI/mpi_events, MPI_EventEncoding.h and src/merger/paraver/labels.c; files: Paraver's
utils/traceparser (.pcf, .row).
"""

from dataclasses import dataclass

from traces.record.phases import PHASES

APPLICATION = 40000001
COLLECTIVE = 50000002
SEND_SIZE, RECEIVE_SIZE, ROOT, COMMUNICATOR = 50100001, 50100002, 50100003, 50100004
PHASE, STEP_NUMBER, STRATEGY = 90000001, 90000002, 90000003
RATE_IN, RATE_OUT, RATE_STALLED = 90000010, 90000011, 90000012
WAITED = 90000020

IDLE, RUNNING, SYNCHRONIZATION, INPUT_OUTPUT, GROUP_COMMUNICATION, OTHERS, MEMORY_TRANSFER = 0, 1, 5, 12, 13, 15, 17
# Extrae's names and colours.
STATES = {
    IDLE: ("Idle", (117, 195, 255)),
    RUNNING: ("Running", (0, 0, 255)),
    SYNCHRONIZATION: ("Synchronization", (179, 0, 0)),
    INPUT_OUTPUT: ("I/O", (172, 174, 41)),
    GROUP_COMMUNICATION: ("Group Communication", (255, 144, 26)),
    OTHERS: ("Others", (119, 119, 119)),
    MEMORY_TRANSFER: ("Memory transfer", (255, 0, 96)),
}
# Running is what counts as useful in BSC's configurations and POP metrics.
STATE_OF = {
    "data": INPUT_OUTPUT,
    "forward": RUNNING,
    "backward": RUNNING,
    "copy_out": MEMORY_TRANSFER,
    "reduce": GROUP_COMMUNICATION,
    "reduce_scatter": GROUP_COMMUNICATION,
    "allreduce": GROUP_COMMUNICATION,
    "wait": SYNCHRONIZATION,
    "update": RUNNING,
    "bcast": GROUP_COMMUNICATION,
    "allgather": GROUP_COMMUNICATION,
    "copy_in": MEMORY_TRANSFER,
    "eval": RUNNING,
    "checkpoint": INPUT_OUTPUT,
}


@dataclass(frozen=True)
class Collective:
    """An MPI collective, and the part of the vector that a rank sends and receives: none, all, share (1/N), root (all
    on the root, none elsewhere), others (the reverse)."""

    value: int
    label: str
    sends: str
    receives: str


BCAST = Collective(7, "MPI_Bcast", "root", "others")
BARRIER = Collective(8, "MPI_Barrier", "none", "none")
REDUCE = Collective(9, "MPI_Reduce", "all", "root")
ALLREDUCE = Collective(10, "MPI_Allreduce", "all", "all")
ALLGATHER = Collective(17, "MPI_Allgather", "share", "all")
REDUCE_SCATTER = Collective(168, "MPI_Reduce_scatter_block", "all", "share")
COLLECTIVES = (BCAST, BARRIER, REDUCE, ALLREDUCE, ALLGATHER, REDUCE_SCATTER)

# (phase, has a root). Without one a reduce is many of them, a slice to each rank: what MPI calls a reduce-scatter.
COLLECTIVE_OF = {
    ("reduce", True): REDUCE,
    ("reduce", False): REDUCE_SCATTER,
    ("bcast", True): BCAST,
    ("bcast", False): ALLGATHER,
} | {
    (phase, has_root): collective
    for phase, collective in {
        "reduce_scatter": REDUCE_SCATTER,
        "allreduce": ALLREDUCE,
        "allgather": ALLGATHER,
        "wait": BARRIER,
    }.items()
    for has_root in (True, False)
}

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


def pcf_text(strategy: str) -> str:
    """The .pcf: names and colours of all states, types and values. strategy: the run's label."""
    states = "".join(f"{number}    {label}\n" for number, (label, _) in STATES.items())
    colours = "".join(f"{number}    {{{','.join(map(str, colour))}}}\n" for number, (_, colour) in STATES.items())
    types = [
        _event_type({APPLICATION: "Application"}, {0: "End", 1: "Begin"}),
        _event_type(
            {COLLECTIVE: "MPI Collective Comm"}, {0: "Outside MPI"} | {one.value: one.label for one in COLLECTIVES}
        ),
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
    """The .row: names of CPUs, nodes, ranks, threads. cpus: of each rank its CPU, counted from 1.

    CPUs come first: BSC's BasicAnalysis takes the number of processes from the first line.
    """
    by_cpu = sorted(places, key=lambda place: cpus[place["rank"]])
    hosts = {place["node"]: place["host"] for place in by_cpu}
    levels = {
        "CPU": [f"{cpus[place['rank']]}.{place['host']}" for place in by_cpu],
        "NODE": list(hosts.values()),
        "TASK": [f"rank {place['rank']} @ {place['host']}" for place in places],
        "THREAD": [f"THREAD 1.{place['rank'] + 1}.1" for place in places],
    }
    return "\n".join(f"LEVEL {level} SIZE {len(names)}\n" + "".join(f"{name}\n" for name in names)
                     for level, names in levels.items())  # fmt: skip
