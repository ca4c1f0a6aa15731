"""Messages between pipeline stages for arrays on GPUs: dist/stage_links.py through host memory."""

from math import prod

from dist.buffers import host_zeros
from dist.gpu.staging import HostStaging
from dist.stage_links import StageLinks
from dist.waiting import wait, wait_nearby
from dist.world import World


class LinksThroughHost:
    """Has the methods of StageLinks, for arrays of float32 or bfloat16; messages are float32. Collective.

    The host waits for the copy from the GPU before it sends. Compute that is queued next waits for the copy of received
    rows to the GPU. shard_sums: of the stage, if any: each rank sends its share, and the GPUs join the shares.
    """

    def __init__(self, stages_world: World, shape: tuple[int, ...], phase, staging: HostStaging, shard_sums=None):
        self._shard_sums = shard_sums
        self._staging = staging
        self._phase = phase
        self._share = slice(*(shard_sums.share(prod(shape)) if shard_sums else (0, prod(shape))))
        count = self._share.stop - self._share.start
        self._links = StageLinks(stages_world, (count,), phase)
        self.begin = self._links.begin
        self.finish = self._links.finish
        self.progress = self._links.progress
        self._sent = self._pinned(count)
        self._received = self._pinned(count)
        self._sent_head = None  # allocated when the head first travels, like _received_head
        self._received_head = None
        self._head = None  # the received head's destination on the GPU
        self._brought = staging.computed()

    def receive(self, direction: int, into) -> None:
        wait(self._brought)
        self._links.receive(direction, self._received)
        self._bring_up(self._received, into.reshape(-1)[self._share])
        if self._shard_sums:
            self._shard_sums.join(into)

    def send(self, direction: int, rows) -> None:
        self._bring_down(rows.reshape(-1)[self._share], self._sent)
        self._links.send(direction, self._sent)

    def send_head(self, tensor) -> None:
        if self._sent_head is None:
            self._sent_head = self._pinned(tensor.size)
        self._bring_down(tensor.reshape(-1), self._sent_head)
        self._links.send_head(self._sent_head)

    def receive_head(self, tensor) -> None:
        if self._received_head is None:
            self._received_head = self._pinned(tensor.size)
        wait(self._brought)
        self._head = tensor.reshape(-1)
        self._links.receive_head(self._received_head)

    def wait_for_head(self) -> None:
        self._links.wait_for_head()
        self._bring_up(self._received_head, self._head)

    def _bring_down(self, flat, host) -> None:
        with self._phase("copy_out", bytes=host.nbytes):
            wait_nearby(self._staging.out(flat, host), self.progress)

    def _bring_up(self, host, flat) -> None:
        with self._phase("copy_in", bytes=host.nbytes):
            self._brought = self._staging.bring(host, flat)

    def _pinned(self, count: int):
        host = host_zeros(count)
        self._staging.pin(host)
        return host
