"""Messages between pipeline stages: activations to the next stage, gradients back, in the order of the microbatches.

A schedule that sends each message before its receiver needs it cannot hang: sends do not wait, receives are posted
ahead, and messages of one link do not overtake each other (MPI 4.1, section 3.5: same ranks, same tag).
"""

from collections import deque
from math import prod

import numpy as np

from dist.waiting import wait_nearby
from dist.world import World

DOWN, UP, HEAD = range(1, 4)  # tags: to the next stage, to the previous stage, between the first and the last
RECEIVES_AHEAD = 2


class StageLinks:
    """Sends and receives between a rank and the same tp rank of its replica's other stages. Collective over the stages.

    shape: of the float32 rows that are sent. phase(name, bytes=, root=): a context manager around a call's work
    (Tracer.interruption); root is the peer's rank in the job. shard_sums: of this stage (dist/shard_sums.py), if any:
    all its tp ranks have the same rows, so each sends its share, and the receivers join the shares.

    A microbatch's rows are copied through buffers of this class, so the caller may reuse its own at once. Tensors of
    the head are sent and received in place.
    """

    def __init__(self, stages_world: World, shape: tuple[int, ...], phase, shard_sums=None):
        self._comm = stages_world.comm
        self._phase = phase
        self._shard_sums = shard_sums
        self.stage = stages_world.rank
        self.stages = stages_world.size
        self._head_peer = self.stages - 1 - self.stage  # the last stage for the first, and the first for the last
        self._job_ranks = self._comm.allgather(stages_world.job.rank)
        self._share = slice(*(shard_sums.share(prod(shape)) if shard_sums else (0, prod(shape))))
        self._free = []
        self._sends = deque()  # (buffer, request), in their order
        self._head_sends = deque()  # requests
        self._head_receives = deque()
        self._head_bytes = 0
        self._posted = {DOWN: deque(), UP: deque()}  # (buffer, request)
        self._left = {DOWN: 0, UP: 0}  # receives to post

    def begin(self, forwards: int, backwards: int) -> None:
        """Begin a step with these numbers of microbatches in each direction, and post its first receives."""
        self._left[DOWN] = forwards if self.stage > 0 else 0
        self._left[UP] = backwards if self.stage < self.stages - 1 else 0
        for direction in (DOWN, UP):
            for _ in range(RECEIVES_AHEAD):
                self._post(direction)

    def receive(self, direction: int, into: np.ndarray) -> None:
        """Receive the next rows from up or down the pipeline into `into`, C-contiguous."""
        if not self._posted[direction]:
            raise ValueError(f"stage {self.stage} receives more than its step has: begin(...) says how many")
        buffer, request = self._posted[direction].popleft()
        with self._phase("recv", bytes=buffer.nbytes, root=self._job_ranks[self._source(direction)]):
            self._wait(request)
        into.reshape(-1)[self._share] = buffer
        self._free.append(buffer)
        self._post(direction)
        if self._shard_sums:
            self._shard_sums.join(into)

    def send(self, direction: int, rows: np.ndarray) -> None:
        """Start to send rows down or up the pipeline. The caller may overwrite them at once."""
        peer = self.stage + (1 if direction == DOWN else -1)
        buffer = self._take_buffer()
        with self._phase("send", bytes=buffer.nbytes, root=self._job_ranks[peer]):
            buffer[:] = rows.reshape(-1)[self._share]
            self._sends.append((buffer, self._comm.Isend(buffer, peer, direction)))
            self.progress()

    # The head: the last stage uses the token embedding, which the first stage owns, and returns its gradient. Each is
    # one message: 76 MB at 4 Gbit/s took 175 ms if one end called MPI every 5 ms; 73 pieces took 6 s (MPICH 5.0.2).

    def send_head(self, tensor: np.ndarray) -> None:
        """Begin to send the embedding or its gradient to the other end. It must not change until `finish`."""
        with self._phase("borrow", bytes=tensor.nbytes, root=self._job_ranks[self._head_peer]):
            self._head_sends.append(self._comm.Isend(tensor.reshape(-1), self._head_peer, HEAD))
            self.progress()

    def receive_head(self, tensor: np.ndarray) -> None:
        """Begin to receive the embedding or its gradient from the other end."""
        self._head_bytes = tensor.nbytes
        self._head_receives.append(self._comm.Irecv(tensor.reshape(-1), self._head_peer, HEAD))

    def wait_for_head(self) -> None:
        """Wait until receive_head's tensor has arrived."""
        with self._phase("borrow", bytes=self._head_bytes, root=self._job_ranks[self._head_peer]):
            while self._head_receives:
                self._wait(self._head_receives.popleft())

    def progress(self) -> None:
        """Advance the messages in flight without waiting. Large messages need MPI calls at both ends."""
        while self._sends and self._sends[0][1].Test():
            self._free.append(self._sends.popleft()[0])
        for requests in (self._head_sends, self._head_receives):
            while requests and requests[0].Test():
                requests.popleft()
        for posted in self._posted.values():
            if posted:
                posted[0][1].Test()

    def finish(self) -> None:
        """End a step: wait until all sends are complete. RuntimeError if an announced message was not received.

        This wait is not a phase, because there is one phase per message.
        """
        if any(self._posted.values()) or self._head_receives:
            raise RuntimeError(
                f"stage {self.stage} ends a step in which it has not received all that begin(...) announced"
            )
        while self._sends or self._head_sends:
            self._wait(self._sends[0][1] if self._sends else self._head_sends[0])
            self.progress()

    def _post(self, direction):
        if self._left[direction]:
            self._left[direction] -= 1
            buffer = self._take_buffer()
            self._posted[direction].append((buffer, self._comm.Irecv(buffer, self._source(direction), direction)))

    def _take_buffer(self):
        """Take a free buffer: fresh memory would cost 7% of a step in page faults (124M model, 1024 rows)."""
        return self._free.pop() if self._free else np.zeros(self._share.stop - self._share.start, np.float32)

    def _source(self, direction):
        return self.stage - 1 if direction == DOWN else self.stage + 1

    def _wait(self, request):
        wait_nearby(request, self.progress)
