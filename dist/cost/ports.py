"""What messages travel over: links, and the nodes' ports, of which each message under way gets a part.

A port serves what came first, as a queue of packets does. But no more of one message than the queue holds: then the
sender has to wait for room, and its message stands behind what others have sent meanwhile.
"""

from dataclasses import dataclass

import numpy as np

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
class Transfer:
    """A message on its way through two ports, numbered as PortShares.capacity is."""

    message: object
    ports: tuple[int, int]
    left: float  # bytes
    in_queue: float = 0.0  # of these, bytes that move before it has to queue again
    rate: float = 0.0  # bytes/s


class PortShares:
    """Messages under way at once, and what each gets of the nodes' ports. `moving`: in the order of their service.

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
