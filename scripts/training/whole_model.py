"""Bring all parameters of a model to rank 0, range by range, from other ranks or from a GPU.

If several ranks share a model, those of replica 0 send their boxes of each tensor to rank 0 (gpt2/model_shards.py).
"""

from contextlib import nullcontext

import numpy as np

from dist.sharded import Slots
from dist.waiting import wait
from gpt2.model_shards import Tensor
from gpt2.parameters import Layout, Parameters
from scripts.training.state import shares_model


class WholeModel:
    """All parameters in host memory, possibly one range at a time.

    held: the parameters of this rank. before_use of the strategy and fetch of the backend, functions of (start, stop),
    bring a range into `held`: under ZeRO-3 a rank gathers it, from a GPU it copies it. shared: whether several ranks
    share the model. parameters: of the whole model; the same as `held` unless the model is shared, else a buffer for
    one range on rank 0. mesh: see state.py. evaluated: of the strategy; read parameters only
    within `with model.evaluated()`. The constructor is collective.
    """

    def __init__(self, held: Parameters, before_use, fetch, mesh=None, evaluated=nullcontext):
        self.held = self.parameters = held
        self._before_use = before_use
        self._fetch = fetch
        self.evaluated = evaluated
        self.shared = shares_model(mesh)
        self._copy = ShardGathering(held, mesh) if self.shared else None
        if self._copy and self._copy.whole:
            self.parameters = self._copy.whole

    def bring_all(self) -> None:
        """Bring all ranges into the memory in which the model computes. Collective."""
        for start, stop in self.held.layout.ranges:
            self._before_use(start, stop)

    def held_ranges(self):
        """Yield the ranges that this rank holds, each while the range's parameters are present. Collective."""
        for start, stop in self.held.layout.ranges:
            self._bring(start, stop)
            if start < stop:
                yield start, stop

    def ranges(self):
        """Yield the whole model's ranges while their parameters are present, on rank 0 alone if ranks share the model.

        Collective: every rank iterates over all ranges.
        """
        return self._gathered_ranges() if self._copy else self.held_ranges()

    def _gathered_ranges(self):
        layout = self.held.layout
        first = 0 if layout.shard.is_first else 1 + layout.shard.first_layer  # the embeddings are range 0 of the whole
        own = dict(enumerate(layout.ranges, first))
        whole = Layout(layout.config)
        for number, (start, stop) in enumerate(whole.ranges):
            if number in own:
                self._bring(*own[number])
            self._copy.gather(whole.tensors_in(start, stop))
            yield start, stop

    def _bring(self, start: int, stop: int) -> None:
        self._before_use(start, stop)  # even for an empty range: other ranks may wait for this rank in the call
        if start < stop:
            self._fetch(start, stop)


class ShardGathering:
    """Gathers the model shards of replica 0 into `whole` on rank 0; other ranks have whole=None."""

    def __init__(self, held: Parameters, mesh):
        self._held = held
        config = held.layout.config
        self._comm = mesh.model_world.comm.Dup()  # for these messages alone
        places = self._comm.allgather((mesh.replica, mesh.stage, mesh.shard, held.layout.shard))
        self._root = next(rank for rank, place in enumerate(places) if place[1:3] == (0, 0))
        self._layouts = [Layout(config, 1, shard) for *_, shard in places]
        self._takes_part = mesh.replica == 0
        self.whole = None
        if self._takes_part and self._comm.rank == self._root:
            layout = Layout(config)
            self.whole = Parameters(layout, Slots(layout.ranges))

    def gather(self, tensors: list[Tensor]) -> None:
        """Gather these tensors of the whole model on rank 0. This rank's shards must be present. Collective."""
        if not self._takes_part:
            return
        for tensor in tensors:
            if self.whole is not None:
                self._receive(tensor)
            elif tensor.name in self._held.layout.by_name:
                wait(self._comm.Isend(self._held.view(tensor.name).reshape(-1), self._root))

    def _receive(self, tensor: Tensor) -> None:
        """Receive a tensor from all ranks that hold a shard of it, or copy this rank's own shard."""
        view = self.whole.view(tensor.name).reshape(tensor.whole_shape)
        for rank, layout in enumerate(self._layouts):
            if theirs := layout.by_name.get(tensor.name):
                box = view[theirs.slices]
                if rank == self._root:
                    box[...] = self._held.view(tensor.name).reshape(theirs.box_shape)
                elif box.flags.c_contiguous:
                    wait(self._comm.Irecv(box.reshape(-1), rank))
                else:
                    landing = np.empty(box.size, np.float32)
                    wait(self._comm.Irecv(landing, rank))
                    box[...] = landing.reshape(box.shape)
