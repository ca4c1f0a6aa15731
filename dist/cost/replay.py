"""Replay messages between ranks: each message moves when both ends are ready, and a rank waits only for its partners.

A rank has turns. In each it posts its ends of messages, waits for some of the messages that it has posted, and
computes. So a rank may be in the next call of a collective while others are still in the previous one, or compute while
its messages are under way. Adding up the times of the calls would miss that.

Messages follow the protocols of UCX:
- A small message is sent at once, and its sender goes on (eager).
- A large message waits until both ends are posted and the receiver has answered (rendezvous). Its send is complete
  when it has arrived, or at once if the socket's buffer takes it.
- Two ranks may exchange large messages over one TCP connection. The rank that begins first fills it with its data, and
  its answer to the other rank's message is queued behind that data. So one direction waits for the other, unless both
  begin within one latency. On the virtual cluster, 4 MB each way took 82 ms if both began together, else 164 ms.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from dist.cost.ports import Links, PortShares
from dist.cost.stages import Stage

# Bytes that Linux accepts at once into a TCP connection (tcp(7), tcp_wmem: 4 MiB, bookkeeping included). On the virtual
# cluster, Open MPI's sends of 1.6 and 2 MB to a waiting receiver returned at once; sends of 2.7 MB did not.
SOCKET_BYTES = 2_400_000


@dataclass(eq=False, slots=True)
class Message:
    """A message and its state."""

    source: int
    destination: int
    size: int
    eager: bool
    added: bool = False  # the receiver adds it to its own data
    apart: bool = False  # stages.Stage.exchange_apart
    joined: tuple[int, ...] = ()  # other ranks that read it at the destination
    posted: dict[int, float] = field(default_factory=dict)  # {rank: when it posted its end}
    under_way: bool = False
    has_left: bool = False  # the send is complete
    arrived: bool = False
    was_taken: bool = False  # it has arrived, and its receiver has posted its end


@dataclass(eq=False, slots=True)
class Turn:
    """One turn of a rank: it posts its ends of `posts`, waits until its ends of `waits`, posted now or before, are
    complete, and computes for `seconds`."""

    posts: list[Message] = field(default_factory=list)
    waits: list[Message] = field(default_factory=list)
    seconds: float = 0.0


def replay_seconds(stages: list[Stage], links: Links) -> float:
    """Return when the last rank finishes the last stage. All ranks begin at once; no stage is all_together."""
    turns = [[] for _ in links.nodes]
    for stage in stages:
        for rank, turn in stage_turns(stage, links.rendezvous_bytes).items():
            turns[rank].append(turn)
    return max(Replay(turns, links).run())


def stage_turns(stage: Stage, rendezvous_bytes: int) -> dict[int, Turn]:
    """Return the turn of each rank with messages in a stage: post its receives, then its sends, and wait for all."""
    receives = defaultdict(list)
    sends = defaultdict(list)
    for source, destination, size in np.stack([stage.source, stage.destination, stage.size], axis=1).tolist():
        message = Message(source, destination, size, size < rendezvous_bytes, stage.added > 0, stage.exchange_apart)
        receives[destination].append(message)
        sends[source].append(message)
    both = {rank: receives[rank] + sends[rank] for rank in receives.keys() | sends.keys()}
    return {rank: Turn(messages, messages) for rank, messages in both.items()}


class Replay:
    """The present turn of each rank, and the events to come. `now`: seconds since the beginning.

    turns: the turns of each rank, in order.
    """

    def __init__(self, turns: list[list[Turn]], links: Links):
        self.links = links
        self.now = 0.0
        self.turns = [own[::-1] for own in turns]  # the next turn is last, for pop()
        self.present = [Turn() for _ in turns]
        self.waiting = [set() for _ in turns]  # messages of its present turn that the rank waits for
        self.adding_s = [0.0 for _ in turns]  # time the rank needs to add the arrived messages
        self.ends_s = [None for _ in turns]  # when each rank finished its turns
        self.queues = defaultdict(list)  # {pair of ranks: messages on the pair's connection}
        # A heap of (time, number, function, its argument). Numbers keep simultaneous events in order.
        self.events = []
        self.event_count = 0
        self.shares = PortShares(links.in_s, links.out_s, links.queue_bytes)
        for rank in range(len(turns)):
            self._later(0.0, self._next_turn, rank)

    def run(self) -> list[float]:
        """Return when each rank finished its turns. ValueError if ranks wait for one another forever."""
        while self.events or self.shares.moving:
            event_s = self.events[0][0] if self.events else float("inf")
            # Compare times from now, not absolute times: late in a slow replay, `now` plus a fast message's remaining
            # time would round to `now`, and nothing would ever move.
            to_event_s = event_s - self.now
            to_end_s = self.shares.seconds_to_next_end()
            ended = self.shares.advance(min(to_event_s, to_end_s))
            self.now = event_s if to_event_s <= to_end_s else self.now + to_end_s
            for message in ended:
                self._arrive(message)
            if to_event_s <= to_end_s:
                _, _, what, subject = heapq.heappop(self.events)
                what(subject)
        if waiting := sum(end_s is None for end_s in self.ends_s):
            raise ValueError(
                f"{waiting} of {len(self.turns)} ranks wait for one another, expected turns in which what is waited "
                "for is sent: look at the schedule"
            )
        return self.ends_s

    def _later(self, delay_s: float, what, subject) -> None:
        self.event_count += 1
        heapq.heappush(self.events, (self.now + delay_s, self.event_count, what, subject))

    # Ranks.

    def _next_turn(self, rank: int) -> None:
        if not self.turns[rank]:
            self.ends_s[rank] = self.now
            return
        turn = self.turns[rank].pop()
        self.present[rank] = turn
        self.adding_s[rank] = 0.0
        for message in turn.posts:
            self._post(rank, message)
        self.waiting[rank] = {message for message in turn.waits if not _is_over(message, rank)}
        if not self.waiting[rank]:
            self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        self._later(self.adding_s[rank] + self.present[rank].seconds, self._next_turn, rank)

    def _over(self, rank: int, message: Message) -> None:
        """Note that the rank is done with the message; go on if it waits for no other."""
        if message in self.waiting[rank]:
            self.waiting[rank].remove(message)
            if not self.waiting[rank]:
                self._go_on(rank)

    # Messages.

    def _post(self, rank: int, message: Message) -> None:
        message.posted[rank] = self.now
        if message.eager and rank == message.source:
            self._later(self.links.latency_s, self._enqueue, message)
            self._leave(message)
        elif message.arrived:
            self._take(message)
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
        """Start the messages between the two ranks of `changed` that are no longer held up."""
        queue = self.queues[frozenset((changed.source, changed.destination))]
        for place, message in enumerate(queue):
            if not message.under_way and not any(self._holds_up(other, message) for other in queue[:place]):
                message.under_way = True
                if not message.eager and message.size <= SOCKET_BYTES:
                    self._leave(message)
                nodes = self.links.nodes[message.source], self.links.nodes[message.destination]
                self.shares.add(message, message.size, *nodes)

    def _holds_up(self, other: Message, message: Message) -> bool:
        """Return whether `message` waits for `other`, which was queued before it on their connection."""
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
        if not message.has_left:
            self._leave(message)
        if message.destination in message.posted:
            self._take(message)

    def _leave(self, message: Message) -> None:
        message.has_left = True
        self._over(message.source, message)

    def _take(self, message: Message) -> None:
        message.was_taken = True
        if message.added and message.under_way:
            self.adding_s[message.destination] += message.size * self.links.add_s
        for rank in (message.destination, *message.joined):
            self._over(rank, message)


def _is_over(message: Message, rank: int) -> bool:
    return message.has_left if rank == message.source else message.was_taken
