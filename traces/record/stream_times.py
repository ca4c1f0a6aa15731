"""Times of phases on a GPU's stream, on the host's clock, while the host runs ahead of the GPU.

An edge is the beginning or end of a phase. Edges of a phase on the GPU are events on its stream; the host
does not wait for them. Edges of a phase on the host are readings of its clock. Settling turns events into times at a
step's end, after one wait for the stream, or earlier if the events run out. Then only old edges are settled, to avoid
waiting for recent work. Edges keep their order, so that no time counts twice: a host phase that began while the GPU was
still busy with the previous phase begins when that phase ended.

The anchor is an event that the host waited for on an idle stream. An event's time is the anchor's plus the GPU's
milliseconds since then. Three errors add up: half of the time to record the anchor and wait for it (about 10 us, the
best of a few), the drift of the two clocks since (100 ppm would be 0.1 ms in a step of a second), and the 0.5 us
resolution of events. An event's time is never before the host recorded it, nor after the host saw that it had passed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

from traces.record.phases import COMPUTE, COPY, check_phase

GPU_PHASES = (*COMPUTE, *COPY, "eval")
EVENTS = 256
ANCHOR_TRIES = 3


@dataclass(slots=True, eq=False)
class Edge:
    """The beginning or end of a phase. ns: the host's clock when it was recorded; once settled, when it happened.

    event: on the stream; None for an edge on the host. An end has its `begin`, another Edge, and
    `report(begin_ns, end_ns)`, which is called when both are settled.
    """

    ns: int
    event: object
    begin: "Edge | None"
    report: Callable[[int, int], None] | None


class StreamTimes:
    """Times phases that follow each other. Holds the edges that are not settled yet.

    device: has stream, new_event(), elapsed_ms(start, stop), synchronize(), and optionally range_push(name) and
    range_pop() to mark phases for a profiler. Its events have record(stream), synchronize() and done.
    phases: names of the phases that run on the stream or leave work there; all others run on the host.
    """

    def __init__(self, device, phases):
        self._device = device
        self._phases = frozenset(check_phase(name) for name in phases)
        self._free = deque(device.new_event() for _ in range(EVENTS))
        self._edges = deque()
        self._latest_ns = 0
        self._anchors = [device.new_event() for _ in range(ANCHOR_TRIES)]
        self._range_push = getattr(device, "range_push", lambda name: None)
        self._range_pop = getattr(device, "range_pop", lambda: None)
        self._settle_and_anchor()

    def begin_step(self, number: int) -> None:
        """Settle the edges between the steps, and anchor the GPU's clock anew."""
        self._settle_and_anchor()
        self._range_push(f"step {number}")

    def end_step(self, failed: bool) -> None:
        """Settle the step's edges. failed: an error ended it; the GPU may be stuck, so do not wait for it."""
        self._range_pop()
        if failed:
            self.settle_without_waiting()
        else:
            self.settle()

    def begin(self, name: str) -> Edge:
        """Record the beginning of the phase `name`, on the host or on the stream."""
        self._range_push(name)
        return self._record(name, None, None)

    def end(self, name: str, begin: Edge, report) -> None:
        """Record the end of the phase. report(begin_ns, end_ns) is called once both are known."""
        self._record(name, begin, report)
        self._range_pop()

    def settle(self) -> None:
        """Wait for the stream and settle every edge. Errors of the GPU's work are raised here."""
        self._device.synchronize()
        self._settle(len(self._edges))

    def settle_without_waiting(self) -> None:
        """Settle at once: work that the GPU has not finished ends now."""
        self._settle(len(self._edges), waited=False)

    def _settle_and_anchor(self) -> None:
        self.settle()
        self._error_ns, self._anchor_ns, self._anchor = min(map(self._tie, self._anchors), key=lambda tie: tie[0])

    def _tie(self, event):
        """Return (error, time, event) of an event on an idle stream, in ns."""
        before = perf_counter_ns()
        event.record(self._device.stream)
        event.synchronize()
        after = perf_counter_ns()
        return (after - before) // 2, (after + before) // 2, event

    def _record(self, name: str, begin, report) -> Edge:
        event = None
        if name in self._phases:
            if not self._free:
                self._settle_older_half()
            event = self._free.popleft()
        edge = Edge(perf_counter_ns(), event, begin, report)
        if event is not None:
            event.record(self._device.stream)
        self._edges.append(edge)
        return edge

    def _settle_older_half(self) -> None:
        """Free half of the events. The host waits only if it is so far ahead of the GPU."""
        places = [place for place, edge in enumerate(self._edges) if edge.event is not None]
        middle = places[len(places) // 2]
        self._edges[middle].event.synchronize()
        self._settle(middle + 1)

    def _settle(self, count: int, waited: bool = True) -> None:
        """Settle the oldest edges. waited: their events have passed; False asks each event."""
        now = perf_counter_ns()
        passing = True
        for _ in range(count):
            edge = self._edges.popleft()
            if edge.event is not None:
                passing = waited or (passing and _has_passed(edge.event))
                if passing:
                    since_anchor_ns = round(self._device.elapsed_ms(self._anchor, edge.event) * 1e6)
                    edge.ns = max(edge.ns, self._anchor_ns + since_anchor_ns)
                elif edge.report:
                    edge.ns = now
                self._free.append(edge.event)
            edge.ns = self._latest_ns = min(max(edge.ns, self._latest_ns), now)
            if edge.report:
                edge.report(edge.begin.ns, edge.ns)


def _has_passed(event) -> bool:
    try:
        return bool(event.done)
    except Exception:  # the caller already gets the error that stopped the GPU
        return False
