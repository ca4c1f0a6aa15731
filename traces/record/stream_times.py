"""StreamTimes: when phases began and ended beside a GPU, on the host's clock, though the host runs ahead of the GPU.

An edge is where a phase begins or ends. If the phase runs on the GPU, its edges are events on the stream, which nobody
waits for; if it runs on the host, they are readings of the host's clock. Settling turns events into times. It happens
at a step's end, after one wait for the stream, or earlier where the events run out: then only old edges are settled,
so that nobody waits for recent work. Edges stay in their order, so no time counts twice: a phase of the host that began
while the GPU was still busy with the phase before begins when that one ended.

The anchor is an event that the host waited for on an idle stream. An event's time is the anchor's plus the GPU's
milliseconds since then. Its error is the sum of three: half of what recording the anchor and waiting for it took (about
10 us, the best of a few); what the two clocks drifted apart since (100 ppm would be 0.1 ms in a step of a second); and
the 0.5 us that events resolve. It is never before the host recorded the event, nor after the host saw it passed.
"""

from collections import deque
from time import perf_counter_ns

from traces.record.phases import COMPUTE, COPY, check_phase

GPU_PHASES = (*COMPUTE, *COPY, "eval")
EVENTS = 256
ANCHOR_TRIES = 3


class Edge:
    """Where a phase begins or ends. ns: the host's clock when it was recorded; when it came to pass, once settled.

    An end has its `begin`, another Edge, and `report(begin_ns, end_ns)`, to be called when both are settled.
    """

    __slots__ = ("begin", "event", "ns", "report")

    def __init__(self, ns: int, event, begin=None, report=None):
        self.ns, self.event, self.begin, self.report = ns, event, begin, report


class StreamTimes:
    """The edges that are not settled yet, of phases that follow each other.

    device: has stream, new_event(), elapsed_ms(start, stop), synchronize(), and range_push(name), range_pop() if phases
    are to be marked for a profiler; its events have record(stream), synchronize() and done.
    phases: names of those that run on the stream, or leave work there; all others are the host's.
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
        """Settle what lies between the steps, and tie the GPU's clock to the host's anew."""
        self._settle_and_anchor()
        self._range_push(f"step {number}")

    def end_step(self, failed: bool) -> None:
        """Settle the step's edges. failed: an error ended it, and the GPU may be stuck, so nobody waits for it."""
        self._range_pop()
        if failed:
            self.settle_without_waiting()
        else:
            self.settle()

    def begin(self, name: str) -> Edge:
        """The phase `name` begins where the host is, or where the GPU will be when it gets here."""
        self._range_push(name)
        return self._record(name, None, None)

    def end(self, name: str, begin: Edge, report) -> None:
        """It ends. report(begin_ns, end_ns) is called once that is known."""
        self._record(name, begin, report)
        self._range_pop()

    def settle(self) -> None:
        """Wait for the stream and settle every edge. Errors of the GPU's work come to light here."""
        self._device.synchronize()
        self._settle(len(self._edges))

    def settle_without_waiting(self) -> None:
        """Settle at once: what the GPU is in the middle of ends now."""
        self._settle(len(self._edges), waited=False)

    def _settle_and_anchor(self) -> None:
        self.settle()
        self._error_ns, self._anchor_ns, self._anchor = min(map(self._tie, self._anchors), key=lambda tie: tie[0])

    def _tie(self, event):
        """(error, time, event) in ns, of an event on an idle stream."""
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
        """Make room for as many events again: the host waits only if it is that many ahead of the GPU."""
        places = [place for place, edge in enumerate(self._edges) if edge.event is not None]
        middle = places[len(places) // 2]
        self._edges[middle].event.synchronize()
        self._settle(middle + 1)

    def _settle(self, count: int, waited: bool = True) -> None:
        """Settle the oldest edges; their events have passed, or are asked whether they have."""
        now, passing = perf_counter_ns(), True
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
    except Exception:  # whatever kept the GPU from going on is what the caller is to hear of, and is on its way already
        return False
