"""Replay the pipelines of all replicas: the schedule of each stage, and the messages between stages on shared ports.

Every rank of the mesh is a rank of replay.py. Ranks send the messages of dist/stage_links.py and
scripts/training/model_sync.py: no rank waits for a send before the step's end, and receives are posted ahead.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dist.cost.model import links_of
from dist.cost.model_parallel import Plan, Seats
from dist.cost.replay import Message, Replay, Turn
from dist.stage_links import RECEIVES_AHEAD

LENT = "lent"  # the token embedding
RETURNED = "returned"  # its gradient


@dataclass(frozen=True)
class PipelineStep:
    """The work of a replica's stages in a step.

    plans: of each stage. forward_s, backward_s: (p,) seconds of each stage per microbatch, sums over shards included.
    rows, embedding: bytes of a microbatch's activations, and of the token embedding, of all shards. head_share:
    as Head.share in model_parallel.py: the part of the last stage's compute time that the head takes.
    """

    plans: Sequence[Plan]
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    rows: int
    embedding: int
    head_share: float


def replayed_ends_s(pipeline: PipelineStep, seats: Seats, library: str) -> np.ndarray:
    """Return when the last rank of each stage has finished its actions and sends, (p,).

    library: the MPI library, whose protocols decide which sends wait.
    """
    ranks = np.arange(seats.nodes.size).reshape(seats.nodes.shape)  # (stages, replicas, shards)
    links = links_of(replace(seats.cluster, placement=seats.nodes.ravel()), library)
    messages = {}
    for number in range(seats.copies):
        messages |= _messages(pipeline, ranks[:, number], number, links.rendezvous_bytes)
    turns = [StageTurns(pipeline, messages, *place).turns() for place in np.ndindex(ranks.shape)]
    ends_s = Replay(turns, links).run()
    return np.array(ends_s).reshape(ranks.shape).max(axis=(1, 2))


def _messages(pipeline: PipelineStep, ranks: np.ndarray, number: int, rendezvous_bytes: int) -> dict:
    """Return {(action, microbatch, receiving stage, replica): a message per shard}. ranks: of the replica, (p, t)."""
    found = {}
    last = len(pipeline.plans) - 1

    def add(what: str, index: int, source: int, destination: int, size: int) -> None:
        receivers = ranks[destination].tolist()
        found[what, index, destination, number] = [
            Message(
                int(ranks[source, part]), receiver, size // len(receivers), size // len(receivers) < rendezvous_bytes,
                joined=tuple(other for other in receivers if other != receiver),
            )
            for part, receiver in enumerate(receivers)
        ]  # fmt: skip

    for stage, plan in enumerate(pipeline.plans):
        for action, index in plan:
            to = stage + 1 if action == "forward" else stage - 1
            if 0 <= to <= last:
                add(action, index, stage, to, pipeline.rows)
    if last:
        add(LENT, 0, 0, last, pipeline.embedding)
        add(RETURNED, 0, last, 0, pipeline.embedding)
    return found


class StageTurns:
    """The turns of one tp rank of a stage of a replica. messages: of all replicas, from _messages."""

    def __init__(self, pipeline: PipelineStep, messages: dict, stage: int, number: int, part: int):
        self.pipeline = pipeline
        self.messages = messages
        self.stage = stage
        self.number = number
        self.part = part
        self.is_first = stage == 0
        self.is_last = stage == len(pipeline.plans) - 1
        self.made = []
        self.posts = []
        self.sent = []
        self.ahead = {"forward": deque(), "backward": deque()}  # receives that are not posted yet

    def turns(self) -> list[Turn]:
        plan = self.pipeline.plans[self.stage]
        for action, index in plan:
            if message := self._come(action, index):
                self.ahead[action].append(message[self.part])
        for action in self.ahead:
            for _ in range(RECEIVES_AHEAD):
                self._post_next(action)
        for place, (action, index) in enumerate(plan):
            if messages := self._come(action, index):
                self._turn(waits=messages)
                self._post_next(action)
            if action == "forward":
                self._forward(is_first_time=place == 0)
            else:
                self._backward(is_last_time=place == len(plan) - 1)
            self._send(action, index, self.stage + (1 if action == "forward" else -1))
        self._turn(waits=[message for message in self.sent if not message.eager])
        return self.made

    def _come(self, what: str, index: int = 0) -> list[Message]:
        return self.messages.get((what, index, self.stage, self.number), [])

    def _turn(self, waits: Sequence[Message] = (), seconds: float = 0.0) -> None:
        self.made.append(Turn(self.posts, list(waits), seconds))
        self.posts = []

    def _post_next(self, action: str) -> None:
        if self.ahead[action]:
            self.posts.append(self.ahead[action].popleft())

    def _send(self, what: str, index: int, to: int) -> None:
        if messages := self.messages.get((what, index, to, self.number)):
            self.posts.append(messages[self.part])
            self.sent.append(messages[self.part])

    def _forward(self, is_first_time: bool) -> None:
        seconds = self.pipeline.forward_s[self.stage]
        lent = self._come(LENT)
        if is_first_time and self.is_first:
            self._send(LENT, 0, len(self.pipeline.plans) - 1)
        if is_first_time and lent:
            # The receive is posted only when the stage has rows to compute with.
            self.posts.append(lent[self.part])
            self._turn(seconds=(1 - self.pipeline.head_share) * seconds)
            self._turn(lent)
            seconds *= self.pipeline.head_share
        self._turn(seconds=seconds)

    def _backward(self, is_last_time: bool) -> None:
        seconds = self.pipeline.backward_s[self.stage]
        returned = self._come(RETURNED)
        if is_last_time and self.is_last and not self.is_first:
            self._turn(seconds=self.pipeline.head_share * seconds)
            self._send(RETURNED, 0, 0)
            seconds *= 1 - self.pipeline.head_share
        if is_last_time and returned:
            self.posts.append(returned[self.part])
        self._turn(seconds=seconds)
        if is_last_time and returned:
            self._turn(returned)
