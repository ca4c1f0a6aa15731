"""Seconds of messages whose ranks wait for nobody but their partners: each one moves when its two ends are ready.

A rank goes through the stages (message_stages.py) in their order: in each it posts all that it sends and receives, and
when that is done it goes on. So it may be in the next call of a collective while others are still in this one, which
adding up stages does not show. Messages under way share the nodes' ports (port_shares.py).

How a message goes follows the protocols of UCX. A small one is sent at once, and its sender goes on (eager). A large
one waits until both are there and the receiver has answered (rendezvous); its sender goes on when it has arrived, or
at once if the socket takes it in. If two exchange large messages over one TCP connection, the answer of the earlier
one stands in the queue behind its data: one direction waits for the other, unless both begin within a latency of each
other. Measured on the virtual cluster: 4 MB each way, 82 or 164 ms.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from dist.cost.port_shares import PortShares
from dist.cost.stages import Stage

# What Linux takes from a sender into a TCP connection at once (tcp(7), tcp_wmem: 4 MiB, bookkeeping included). Under
# Open MPI sends of 1.6 and 2 MB to a waiting receiver came back at once on the virtual cluster, of 2.7 MB they did not.
SOCKET_BYTES = 2_400_000


@dataclass(frozen=True)
class Links:
    """What messages travel over. nodes: of each rank; in_s, out_s: seconds a byte, (nodes,); latency_s: of a message.

    local_s, local_added_s: seconds a byte inside a node, as it is and when it is added to another; add_s: to add a byte
    that came over the network. rendezvous_bytes: the smallest message that waits for its receiver. queue_bytes: as
    port_shares.PortShares says. one_connection: the two of a pair share it.
    """

    nodes: np.ndarray
    in_s: np.ndarray
    out_s: np.ndarray
    latency_s: float
    local_s: float
    local_added_s: float
    add_s: float
    rendezvous_bytes: int
    queue_bytes: float
    one_connection: bool


@dataclass(eq=False, slots=True)
class Message:
    """posted: which of its two ends have come to it, and when; apart: as message_stages.Stage.exchange_apart.

    sent: its sender went on when it began to move, as the socket took it in.
    """

    source: int
    destination: int
    size: int
    added: bool
    eager: bool
    apart: bool
    posted: dict[int, float]
    under_way: bool = False
    sent: bool = False
    arrived: bool = False


def replay_seconds(stages: list[Stage], links: Links) -> float:
    """When the last rank has done the last stage; all begin at once."""
    return Replay(stages, links).run()


class Replay:
    def __init__(self, stages: list[Stage], links: Links):
        ranks = len(links.nodes)
        self.links, self.now = links, 0.0
        self.turns = _turns(stages, ranks, links.rendezvous_bytes)
        self.unfinished, self.adding_s = [0] * ranks, [0.0] * ranks
        self.queues = defaultdict(list)  # by pair: what waits for the pair's connection
        self.events, self.event_count = [], 0
        self.shares = PortShares(links.in_s, links.out_s, links.queue_bytes)

    def run(self) -> float:
        for rank in range(len(self.turns)):
            self._next_turn(rank)
        while self.events or self.shares.moving:
            event_s = self.events[0][0] if self.events else float("inf")
            # Not by sums: late in a slow replay the moment until a fast message ends would round to nothing, for ever.
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
        """Of what waits between two ranks: what nothing holds up any more."""
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
    """Of each rank, last turn first: the messages it takes part in, in each stage, those it receives first."""
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
