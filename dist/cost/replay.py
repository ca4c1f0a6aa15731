"""Seconds of messages whose ranks wait for nobody but their partners: each moves when its two ends are ready.

A rank goes through the stages (stages.py) in their order. In each it posts all that it sends and receives, and goes on
when that is done. So a rank may be in the next call of a collective while others are still in this one. A sum of the
stages' times would not show that.

How a message goes follows the protocols of UCX:
- A small message is sent at once, and its sender goes on (eager).
- A large one waits until both ends are there and the receiver has answered (rendezvous). Its sender goes on when the
  message has arrived, or at once if the socket takes it in.
- Two ranks may exchange large messages over one TCP connection. The rank that begins first fills it with its data, and
  its answer to the other's message stands in the queue behind them. So one direction waits for the other, unless both
  begin within a latency of each other. Measured on the virtual cluster: 4 MB each way took 82 ms in step, else 164 ms.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from dist.cost.stages import Stage

# What Linux takes from a sender into a TCP connection at once (tcp(7), tcp_wmem: 4 MiB, bookkeeping included). Under
# Open MPI sends of 1.6 and 2 MB to a waiting receiver came back at once on the virtual cluster, of 2.7 MB they did not.
SOCKET_BYTES = 2_400_000
A_MOMENT_S = 1e-9  # what would end in so short a time has ended: sums of times are not exact


@dataclass(frozen=True)
class Links:
    """What messages travel over."""

    nodes: np.ndarray  # the node of each rank, (ranks,)
    in_s: np.ndarray  # seconds a byte takes into each node, (nodes,)
    out_s: np.ndarray  # and out of it
    latency_s: float  # of one message between nodes
    local_s: float  # seconds a byte takes inside a node
    local_added_s: float  # the same where it is added to another
    add_s: float  # seconds to add a byte that came over the network
    rendezvous_bytes: int  # the smallest message that waits for its receiver
    queue_bytes: float  # of one message, what a port's queue holds
    one_connection: bool  # both directions between two ranks share one TCP connection


@dataclass(eq=False, slots=True)
class Message:
    """A message and what has become of it so far."""

    source: int
    destination: int
    size: int
    added: bool  # the receiver adds it to its own
    eager: bool
    apart: bool  # stages.Stage.exchange_apart
    posted: dict[int, float]  # {rank: when it came to this message}, of its two ends
    under_way: bool = False
    sent: bool = False  # its sender went on when it began to move: the socket took it in
    arrived: bool = False


@dataclass(eq=False, slots=True)
class Transfer:
    """A message on its way through two ports, numbered as PortShares.capacity is."""

    message: object
    ports: tuple[int, int]
    left: float  # bytes
    in_queue: float = 0.0  # of these, bytes that move before it has to queue again
    rate: float = 0.0  # bytes/s


def replay_seconds(stages: list[Stage], links: Links) -> float:
    """When the last rank has done the last stage; all begin at once."""
    return Replay(stages, links).run()


class Replay:
    """The ranks, each at its place in the stages, and the events to come. `now`: seconds since the beginning."""

    def __init__(self, stages: list[Stage], links: Links):
        ranks = len(links.nodes)
        self.links, self.now = links, 0.0
        self.turns = _turns(stages, ranks, links.rendezvous_bytes)
        self.unfinished = [0] * ranks  # messages of the rank's present stage
        self.adding_s = [0.0] * ranks  # what the rank will take to add those that have arrived
        self.queues = defaultdict(list)  # {pair of ranks: what waits for the pair's connection}
        # A heap of (time, number, function, its argument). Numbers keep events of the same time in their order.
        self.events, self.event_count = [], 0
        self.shares = PortShares(links.in_s, links.out_s, links.queue_bytes)

    def run(self) -> float:
        for rank in range(len(self.turns)):
            self._next_turn(rank)
        while self.events or self.shares.moving:
            event_s = self.events[0][0] if self.events else float("inf")
            # Compared are the times from now, not the moments: late in a slow replay, `now` plus what a fast message
            # still takes would round to `now`, and nothing would move for ever.
            to_event_s, to_end_s = event_s - self.now, self.shares.seconds_to_next_end()
            ended = self.shares.advance(min(to_event_s, to_end_s))
            self.now = event_s if to_event_s <= to_end_s else self.now + to_end_s
            for message in ended:
                self._arrive(message)
            if to_event_s <= to_end_s:
                _, _, what, subject = heapq.heappop(self.events)
                what(subject)
        return self.now

    def _later(self, delay_s: float, what, subject) -> None:
        self.event_count += 1
        heapq.heappush(self.events, (self.now + delay_s, self.event_count, what, subject))

    def _next_turn(self, rank: int) -> None:
        """Post the receives, then the sends, of the rank's next stage."""
        if not self.turns[rank]:
            return
        messages = self.turns[rank].pop()
        self.unfinished[rank], self.adding_s[rank] = len(messages), 0.0
        for message in messages:
            message.posted[rank] = self.now
            if message.eager and rank == message.source:
                self._later(self.links.latency_s, self._enqueue, message)
                self._finish(rank)
            elif message.arrived:
                self._receive(message)
            elif not message.eager and len(message.posted) == 2:
                self._later(self.links.latency_s, self._enqueue, message)

    def _enqueue(self, message: Message) -> None:
        if self.links.nodes[message.source] == self.links.nodes[message.destination]:
            seconds_a_byte = self.links.local_added_s if message.added else self.links.local_s
            self._later(message.size * seconds_a_byte, self._arrive, message)
            return
        self.queues[frozenset((message.source, message.destination))].append(message)
        self._start_what_may(message)

    def _start_what_may(self, changed: Message) -> None:
        """Start the messages between the two ranks of `changed` that nothing holds up any more."""
        queue = self.queues[frozenset((changed.source, changed.destination))]
        for place, message in enumerate(queue):
            if not message.under_way and not any(self._holds_up(other, message) for other in queue[:place]):
                message.under_way = True
                if not message.eager and message.size <= SOCKET_BYTES:
                    message.sent = True
                    self._finish(message.source)
                nodes = self.links.nodes[message.source], self.links.nodes[message.destination]
                self.shares.add(message, message.size, *nodes)

    def _holds_up(self, other: Message, message: Message) -> bool:
        """Whether `message` waits for `other`, which came to their connection before it."""
        if other.source == message.source:
            return True
        if not self.links.one_connection or message.apart:
            return self.links.one_connection
        if message.eager or other.eager:
            return False
        return abs(message.posted[message.source] - other.posted[other.source]) > self.links.latency_s

    def _arrive(self, message: Message) -> None:
        message.arrived = True
        if message.under_way:
            self.queues[frozenset((message.source, message.destination))].remove(message)
            self._start_what_may(message)
        if not message.eager and not message.sent:
            self._finish(message.source)
        if message.destination in message.posted:
            self._receive(message)

    def _receive(self, message: Message) -> None:
        if message.added and message.under_way:
            self.adding_s[message.destination] += message.size * self.links.add_s
        self._finish(message.destination)

    def _finish(self, rank: int) -> None:
        self.unfinished[rank] -= 1
        if not self.unfinished[rank]:
            self._later(self.adding_s[rank], self._next_turn, rank)


def _turns(stages: list[Stage], ranks: int, rendezvous_bytes: int) -> list[list[list[Message]]]:
    """For each rank, its messages of each stage, those it receives first. The last stage comes first, to be popped."""
    turns = [[] for _ in range(ranks)]
    for stage in reversed(stages):
        receives, sends = defaultdict(list), defaultdict(list)
        for source, destination, size in zip(stage.source, stage.destination, stage.size, strict=True):
            message = Message(
                int(source), int(destination), int(size), stage.added > 0, bool(size < rendezvous_bytes),
                stage.exchange_apart, {},
            )  # fmt: skip
            receives[message.destination].append(message)
            sends[message.source].append(message)
        for rank in receives.keys() | sends.keys():
            turns[rank].append(receives[rank] + sends[rank])
    return turns


class PortShares:
    """Messages under way at once, and what each gets of the nodes' ports. `moving`: in the order of their service.

    A port serves what came first, as a queue of packets does. But no more of one message than the queue holds: then the
    sender has to wait for room, and its message stands behind what others have sent meanwhile.

    in_s, out_s: seconds a byte takes through each node's port, (nodes,); queue_bytes: what a port's queue holds.
    """

    def __init__(self, in_s: np.ndarray, out_s: np.ndarray, queue_bytes: float):
        self.capacity = [*(1 / in_s), *(1 / out_s)]  # bytes/s: every node's way in, then every node's way out
        self.nodes, self.queue_bytes = len(in_s), queue_bytes
        self.moving: list[Transfer] = []

    def add(self, message, size: int, source_node: int, destination_node: int) -> None:
        """`size` bytes begin to move; `message` says whose they are."""
        self._queue(Transfer(message, (int(destination_node), self.nodes + int(source_node)), size))
        self._share()

    def _queue(self, transfer: Transfer) -> None:
        transfer.in_queue = min(transfer.left, self.queue_bytes)
        self.moving.append(transfer)

    def _share(self) -> None:
        """Give each message what those before it leave of both its ports."""
        free = list(self.capacity)
        for transfer in self.moving:
            one, other = transfer.ports
            transfer.rate = min(free[one], free[other])
            free[one] -= transfer.rate
            free[other] -= transfer.rate

    def seconds_to_next_end(self) -> float:
        """Until a message has arrived or has to queue again; infinite if there is none."""
        return min((transfer.in_queue / transfer.rate for transfer in self.moving if transfer.rate), default=np.inf)

    def advance(self, seconds: float) -> list:
        """Let so much time pass, at most until the next end; return the messages that arrive then."""
        through, still = [], []
        for transfer in self.moving:
            transfer.left -= transfer.rate * seconds
            transfer.in_queue -= transfer.rate * seconds
            over = transfer.rate and transfer.in_queue <= transfer.rate * A_MOMENT_S
            (through if over else still).append(transfer)
        if not through:
            return []
        self.moving, arrived = still, []
        for transfer in through:
            if transfer.left <= transfer.rate * A_MOMENT_S:
                arrived.append(transfer.message)
            else:
                self._queue(transfer)
        self._share()
        return arrived
