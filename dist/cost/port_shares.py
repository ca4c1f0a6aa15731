"""Messages under way at once, and what each gets of the nodes' ports.

A port serves what came first, as a queue of packets does, but no more of one message than the queue holds: the
sender has to wait for room, and then stands behind what others have sent meanwhile.
"""

import numpy as np

A_MOMENT_S = 1e-9  # what would end in so short a time has ended: sums of times are not exact


class PortShares:
    """`moving`: the messages under way, in the order in which the ports serve them.

    in_s, out_s: seconds a byte takes through each node's port, (nodes,); queue_bytes: what a port's queue holds.
    """

    def __init__(self, in_s: np.ndarray, out_s: np.ndarray, queue_bytes: float):
        self.capacity = [*(1 / in_s), *(1 / out_s)]
        self.nodes, self.queue_bytes = len(in_s), queue_bytes
        self.moving, self.ports, self.left, self.served, self.rates = [], [], [], [], None

    def add(self, message, size: int, source_node: int, destination_node: int) -> None:
        """`size` bytes begin to move; `message` says whose they are."""
        self._join(message, (int(destination_node), self.nodes + int(source_node)), size)

    def _join(self, message, ports: tuple[int, int], left: float) -> None:
        self.moving.append(message)
        self.ports.append(ports)
        self.left.append(left)
        self.served.append(min(left, self.queue_bytes))
        self.rates = None

    def seconds_to_next_end(self) -> float:
        """Until a message ends or has to stand in the queue again; infinite if there is none."""
        if self.rates is None:
            self.rates = self._rates()
        return min((left / rate for left, rate in zip(self.served, self.rates, strict=True) if rate), default=np.inf)

    def _rates(self) -> list[float]:
        """Bytes/s of each message: what those before it leave of both ports."""
        free, rates = list(self.capacity), []
        for one, other in self.ports:
            rate = min(free[one], free[other])
            free[one] -= rate
            free[other] -= rate
            rates.append(rate)
        return rates

    def advance(self, seconds: float) -> list:
        """Let so much time pass, at most until the next end; the messages that end then, which leave."""
        if not self.moving:
            return []
        rates = self.rates
        self.left = [left - rate * seconds for left, rate in zip(self.left, rates, strict=True)]
        self.served = [left - rate * seconds for left, rate in zip(self.served, rates, strict=True)]
        over = [place for place, left in enumerate(self.served) if rates[place] and left <= rates[place] * A_MOMENT_S]
        if not over:
            return []
        through = [(self.moving[place], self.ports[place], self.left[place], rates[place]) for place in over]
        for column in (self.moving, self.ports, self.left, self.served):
            for place in reversed(over):
                del column[place]
        self.rates, ended = None, []
        for message, ports, left, rate in through:
            if left <= rate * A_MOMENT_S:
                ended.append(message)
            else:
                self._join(message, ports, left)
        return ended
