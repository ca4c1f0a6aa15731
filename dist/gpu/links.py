"""Between the stages of a pipeline whose arrays lie on GPUs: by the messages of dist/stage_links.py, in host memory."""

from math import prod

from dist.buffers import host_zeros
from dist.gpu.copies import Copies
from dist.stage_links import StageLinks
from dist.waiting import wait, wait_nearby
from dist.world import World


class LinksThroughHost:
    """Has the methods of StageLinks, for arrays of float32 or bfloat16; messages are float32. Collective.

    What is sent comes down first, and the host waits for that; what is received goes up, and what is computed next
    waits for it. parts: those of this stage, if there are several: each sends its share alone, and shares are joined on
    the GPUs.
    """

    def __init__(self, stages_world: World, shape: tuple[int, ...], phase, copies: Copies, parts=None):
        self._share, self._parts, self._copies, self._phase = slice(0, prod(shape)), parts, copies, phase
        if parts is not None:
            self._share = slice(*parts.share(prod(shape)))
        count = self._share.stop - self._share.start
        self._links = StageLinks(stages_world, (count,), phase)
        self.begin, self.finish, self.poke = self._links.begin, self._links.finish, self._links.poke
        self._sent, self._received = (self._pinned(count) for _ in range(2))
        self._lent = self._borrowed = None  # the head, on the stages that have one: made when it first travels
        self._borrower = None  # where what is borrowed goes
        self._brought = copies.computed()

    def receive(self, direction: int, into) -> None:
        """The next rows that come down, or up, fill `into`, C-contiguous."""
        wait(self._brought)
        self._links.receive(direction, self._received)
        self._bring_up(self._received, into.reshape(-1)[self._share])
        if self._parts is not None:
            self._parts.join(into)

    def send(self, direction: int, rows) -> None:
        """Begin to send rows down, or up. They may be written to at once."""
        self._bring_down(rows.reshape(-1)[self._share], self._sent)
        self._links.send(direction, self._sent)

    def lend_head(self, wte) -> None:
        """First stage: begin to send it to the last."""
        self._links.lend_head(self._brought_down(wte))

    def borrow_head(self, wte) -> None:
        """Last stage: begin to receive it, early."""
        self._links.borrow_head(self._landing_for(wte))

    def return_head(self, dwte) -> None:
        """Last stage: begin to send its gradient."""
        self._links.return_head(self._brought_down(dwte))

    def take_head(self, dwte) -> None:
        """First stage: begin to receive its gradient."""
        self._links.take_head(self._landing_for(dwte))

    def wait_for_head(self) -> None:
        """What was last begun to be received of the head has come."""
        self._links.wait_for_head()
        self._bring_up(self._borrowed, self._borrower)

    def _brought_down(self, tensor):
        if self._lent is None:
            self._lent = self._pinned(tensor.size)
        self._bring_down(tensor.reshape(-1), self._lent)
        return self._lent

    def _landing_for(self, tensor):
        if self._borrowed is None:
            self._borrowed = self._pinned(tensor.size)
        wait(self._brought)
        self._borrower = tensor.reshape(-1)
        return self._borrowed

    def _bring_down(self, flat, host) -> None:
        with self._phase("copy_out", bytes=host.nbytes):
            wait_nearby(self._copies.out(flat, host), self.poke)

    def _bring_up(self, host, flat) -> None:
        with self._phase("copy_in", bytes=host.nbytes):
            self._brought = self._copies.bring(host, flat)

    def _pinned(self, count: int):
        host = host_zeros(count)
        self._copies.pin(host)
        return host
