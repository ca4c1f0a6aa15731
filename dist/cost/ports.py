"""Links and the nodes' ports, whose bandwidth is allocated to the messages under way.

A port serves messages in order of arrival, like a queue of packets. But the queue holds only so many bytes of one
message. Then the sender waits, and its next bytes queue behind messages that others have sent meanwhile.
"""

from dataclasses import dataclass

import numpy as np

A_MOMENT_S = 1e-9  # a message this close to its end has ended, because sums of times are not exact


@dataclass(frozen=True)
class Links:
    """The rates and protocols of the links that messages travel over."""

    nodes: np.ndarray  # the node of each rank, (ranks,)
    in_s: np.ndarray  # seconds a byte takes into each node, (nodes,)
    out_s: np.ndarray  # the same out of each node
    latency_s: float  # of one message between nodes
    local_s: float  # seconds a byte takes inside a node
    local_added_s: float  # seconds a byte takes inside a node if the receiver adds it
    add_s: float  # seconds to add a byte that came over the network
    rendezvous_bytes: int  # the smallest message that waits for its receiver
    queue_bytes: float  # bytes of one message that a port's queue holds
    one_connection: bool  # both directions between two ranks share one TCP connection


@dataclass(eq=False, slots=True)
class Transfer:
    """A message on its way through two ports, which are indices into PortShares.capacity."""

    message: object
    ports: tuple[int, int]
    left: float  # bytes
    in_queue: float = 0.0  # bytes of `left` that move before the message has to queue again
    rate: float = 0.0  # bytes/s


class PortShares:
    """The messages under way and the bandwidth of each. `moving`: in the order in which ports serve them.

    in_s, out_s: seconds a byte takes through each node's port, (nodes,); queue_bytes: as in Links.
    """

    def __init__(self, in_s: np.ndarray, out_s: np.ndarray, queue_bytes: float):
        self.capacity = [*(1 / in_s), *(1 / out_s)]  # bytes/s: into every node, then out of every node
        self.nodes = len(in_s)
        self.queue_bytes = queue_bytes
        self.moving: list[Transfer] = []

    def add(self, message, size: int, source_node: int, destination_node: int) -> None:
        """Start to move `size` bytes. `advance` returns `message` when they have arrived."""
        self._queue(Transfer(message, (int(destination_node), self.nodes + int(source_node)), size))
        self._share()

    def _queue(self, transfer: Transfer) -> None:
        transfer.in_queue = min(transfer.left, self.queue_bytes)
        self.moving.append(transfer)

    def _share(self) -> None:
        """Allocate to each message the bandwidth that earlier messages left on its two ports."""
        free = list(self.capacity)
        for transfer in self.moving:
            one, other = transfer.ports
            transfer.rate = min(free[one], free[other])
            free[one] -= transfer.rate
            free[other] -= transfer.rate

    def seconds_to_next_end(self) -> float:
        """Return the seconds until a message arrives or has to queue again; infinity if none moves."""
        return min((transfer.in_queue / transfer.rate for transfer in self.moving if transfer.rate), default=np.inf)

    def advance(self, seconds: float) -> list:
        """Advance by `seconds`, at most to the next end; return the messages that arrive then."""
        through = []
        still = []
        for transfer in self.moving:
            transfer.left -= transfer.rate * seconds
            transfer.in_queue -= transfer.rate * seconds
            over = transfer.rate and transfer.in_queue <= transfer.rate * A_MOMENT_S
            (through if over else still).append(transfer)
        if not through:
            return []
        self.moving = still
        arrived = []
        for transfer in through:
            if transfer.left <= transfer.rate * A_MOMENT_S:
                arrived.append(transfer.message)
            else:
                self._queue(transfer)
        self._share()
        return arrived
