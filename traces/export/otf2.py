"""Export to OTF2, the format of Score-P, Vampir and Scalasca, with the Score-P team's package `otf2`.

    OUT/traces.otf2, traces.def, traces/    an archive: definitions, and a file of events for each location

A node is a system tree node, a rank a process with one location. Times are nanoseconds from the run's start, on rank
0's clock. A step is a region with its number as a parameter, and phases are regions inside it. An exchange's phase
contains the region of the corresponding MPI collective, over the ranks that take part and with the collective's sizes.
Its attribute `waited` is the nanoseconds that this rank waited for others. Messages between stages are MPI
messages. Synchronization of replicated parameters (lend, borrow) is a plain region. The counters of a node's ports are
metrics at a location of their own.

Format: OTF2's documentation of its records and definitions, version 3.
"""

from operator import itemgetter
from pathlib import Path

import numpy as np
import otf2
from otf2 import writer

from traces.export import collectives as mpi
from traces.export.spans import WORLD, Communicators, RankSpans, Spans, communicators, lay_out
from traces.read.runs import Run
from traces.record.phases import NAMES, STEP

NANOSECONDS = 10**9  # ticks a second
MESSAGE_TAG = 0  # of stages' messages, which keep their order between two ranks
# {counter: (description, unit)}
COUNTED = {
    "in": ("into the node's ports", "bytes"),
    "out": ("out of the node's ports", "bytes"),
    "stalled": ("port_xmit_wait of the node's ports", "ticks"),
}
MESSAGES = {"send": "MPI_Send", "recv": "MPI_Recv"}
# The order of simultaneous events.
PHASE_ENDS, STEP_ENDS, STEP_BEGINS, PHASE_BEGINS = range(4)


def export(run: Run, path) -> list[Path]:
    """Write the archive into the folder `path`, and return [path]."""
    path = Path(path)
    spans = lay_out(run)
    groups = communicators(run)
    with writer.open(str(path), timer_resolution=NANOSECONDS) as archive:
        definitions = Definitions(archive.definitions, spans, groups)
        for rank in spans.ranks:
            location = definitions.locations[rank.place["rank"]]
            RankEvents(archive.event_writer_from_location(location), definitions, groups, rank).write()
        for node, (counts, _) in spans.counted.items():
            process = definitions.processes[node]
            ports = archive.event_writer(f"ports of node {node}", type=otf2.LocationType.METRIC, group=process)
            for time, *values in counts[["time", *COUNTED]].tolist():
                ports.metric(time, definitions.ports, values)
    return [path]


class Definitions:
    """The definitions that events refer to.

    locations: by rank. processes: by node, the location group of its first rank. comms: by communicator number.
    regions: by phase number. collectives: by ExportedCollective. messages: by the name of their phase.
    """

    def __init__(self, registry, spans: Spans, groups: Communicators):
        self._registry = registry
        self._define_places([rank.place for rank in spans.ranks])
        self._define_comms(groups)
        roles = [otf2.RegionRole.LOOP if name == STEP else otf2.RegionRole.CODE for name in NAMES]
        self.regions = [registry.region(name, region_role=role) for name, role in zip(NAMES, roles, strict=True)]
        self.collectives = {one: self._mpi_region(one.label, one.role) for one in mpi.COLLECTIVES}
        self.messages = {name: self._mpi_region(label, "POINT2POINT") for name, label in MESSAGES.items()}
        self.step_number = registry.parameter(STEP, parameter_type=otf2.ParameterType.UINT64)
        self.waited = registry.attribute("waited", description="ns of waiting for other ranks", type=otf2.Type.UINT64)
        kind = {"metric_mode": otf2.MetricMode.ACCUMULATED_START, "value_type": otf2.Type.UINT64}
        counters = [registry.metric_member(name, text, unit=unit, **kind) for name, (text, unit) in COUNTED.items()]
        self.ports = registry.metric_class(counters, recorder_kind=otf2.RecorderKind.ABSTRACT)

    def _define_places(self, places: list[dict]) -> None:
        root = self._registry.system_tree_node("run", class_name="machine")
        nodes = {}
        self.processes = {}
        self.locations = {}
        for place in places:
            node = place["node"]
            title = place["title"]
            if node not in nodes:
                nodes[node] = self._registry.system_tree_node(place["host"], class_name="node", parent=root)
            process = self._registry.location_group(title, system_tree_parent=nodes[node])
            self.processes.setdefault(node, process)
            self.locations[place["rank"]] = self._registry.location(title, group=process)

    def _define_comms(self, groups: Communicators) -> None:
        everybody = tuple(self.locations.values())
        self._registry.group("ranks", otf2.GroupType.COMM_LOCATIONS, paradigm=otf2.Paradigm.MPI, members=everybody)
        self.comms = {}
        for number, ranks in enumerate(groups.members, start=WORLD):
            name = "MPI_COMM_WORLD" if number == WORLD else f"ranks {', '.join(map(str, ranks))}"
            members = tuple(self.locations[rank] for rank in ranks)
            group = self._registry.group(name, otf2.GroupType.COMM_GROUP, paradigm=otf2.Paradigm.MPI, members=members)
            self.comms[number] = self._registry.comm(name, group=group)

    def _mpi_region(self, label: str, role: str):
        return self._registry.region(label, region_role=getattr(otf2.RegionRole, role), paradigm=otf2.Paradigm.MPI)


class RankEvents:
    """Writes a rank's events in the order of time: the beginning and the end of each span (spans.SPAN)."""

    def __init__(self, events, definitions: Definitions, groups: Communicators, rank: RankSpans):
        self._events = events
        self._definitions = definitions
        self._groups = groups
        self._phases = rank.phases
        self._steps = rank.steps
        self._number = rank.place["rank"]

    def write(self) -> None:
        kinds = (
            (self._phases, "end", PHASE_ENDS, self._leave),
            (self._steps, "end", STEP_ENDS, self._leave),
            (self._steps, "start", STEP_BEGINS, self._enter),
            (self._phases, "start", PHASE_BEGINS, self._enter),
        )
        events = [(int(span[edge]), order, write, span) for spans, edge, order, write in kinds for span in spans]
        for time, _, write, span in sorted(events, key=itemgetter(0, 1)):
            write(time, span)

    def _enter(self, time: int, span: np.void) -> None:
        name = NAMES[span["phase"]]
        self._events.enter(time, self._definitions.regions[span["phase"]])
        if name == STEP:
            self._events.parameter_unsigned_int(time, self._definitions.step_number, int(span["step"]))
        elif name in mpi.COLLECTIVE_OF:
            self._events.enter(time, self._definitions.collectives[_collective(span)])
            self._events.mpi_collective_begin(time)
        elif name in MESSAGES:
            self._events.enter(time, self._definitions.messages[name])
            if name == "send":
                self._events.mpi_send(time, *self._message(span))

    def _leave(self, time: int, span: np.void) -> None:
        name = NAMES[span["phase"]]
        if name in mpi.COLLECTIVE_OF:
            self._end_collective(time, span)
            self._events.leave(time, self._definitions.collectives[_collective(span)])
        elif name in MESSAGES:
            if name == "recv":
                self._events.mpi_recv(time, *self._message(span))
            self._events.leave(time, self._definitions.messages[name])
        self._events.leave(time, self._definitions.regions[span["phase"]])

    def _end_collective(self, time: int, span: np.void) -> None:
        collective = _collective(span)
        number = int(self._groups.of[self._number][span["phase"]])
        ranks = self._groups.members[number - WORLD]
        root = int(span["root"])
        sent, received = collective.sizes(span["bytes"], root == self._number, len(ranks))
        # MPI numbers the root within its communicator.
        counted_root = otf2.CollectiveRoot.NONE.value if root < 0 else ranks.index(root)
        operation = getattr(otf2.CollectiveOp, collective.operation)
        self._events.mpi_collective_end(
            time, operation, self._definitions.comms[number], counted_root, int(sent), int(received),
            attributes={self._definitions.waited: int(span["waited"])},
        )  # fmt: skip

    def _message(self, span: np.void) -> tuple:
        """Return (the other rank, communicator, tag, bytes)."""
        return int(span["root"]), self._definitions.comms[WORLD], MESSAGE_TAG, int(span["bytes"])


def _collective(span: np.void):
    return mpi.COLLECTIVE_OF[NAMES[span["phase"]]][int(span["root"] >= 0)]
