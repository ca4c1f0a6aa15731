"""Bridges between the model's arrays on a GPU and the float32 exchange buffers of a strategy, wherever those are.

The training loop uses a bridge as its strategy. The bridge copies final gradients to the exchange buffers before it
tells the strategy that they are final, and new parameters to the model before their use. If model and strategy share
arrays, none is used.
"""

from contextlib import contextmanager
from dataclasses import dataclass

from dist.gpu.staging import HostStaging
from dist.sharded import Slots
from dist.waiting import Pauses, wait
from gpt2.rounding import RoundedParameters


@dataclass(frozen=True)
class FlatPair:
    """Two flat vectors (size,): arrays, or Slots."""

    parameters: object
    gradients: object


class Bridge:
    """Connects the model to a strategy that has separate arrays. model, exchanged: the FlatPairs of either side.

    rounded: the bfloat16 model's parameters (gpt2/rounding.py), or None; updates write this rank's part of them.
    """

    def __init__(self, strategy, model: FlatPair, exchanged: FlatPair, tracer, rounded: RoundedParameters | None):
        self.strategy = strategy
        self.model = model
        self.exchanged = exchanged
        self.tracer = tracer
        self.rounded = rounded
        self.there = {}  # {place: the range whose new parameters the model has there}
        slots = exchanged.parameters if isinstance(exchanged.parameters, Slots) else None
        self.place_of = None if slots is None else slots.slot_of  # None: each range has its own place

    def __getattr__(self, name):
        """Forward all other attributes to the strategy."""
        return getattr(self.strategy, name)

    def before_use(self, start, stop):
        self.strategy.before_use(start, stop)
        place = (start, stop) if self.place_of is None else self.place_of[start, stop]
        if self.there.get(place) == (start, stop):
            return
        parts = [(start, stop)] if self.rounded is None else self.rounded.missing(start, stop)
        if parts:
            with self.tracer.interruption("copy_in", bytes=4 * sum(high - low for low, high in parts)):
                for part in parts:
                    self._bring(*part)
        self.there[place] = (start, stop)

    def _bring(self, start, stop) -> None:
        """Queue the copy of some new parameters to the model."""
        raise NotImplementedError

    def update(self, lr):
        self.there.clear()
        if self.rounded is not None:
            self.rounded.begin_update()
        return self.strategy.update(lr)


class CastingBridge(Bridge):
    """Both sides are on the GPU, the model in bfloat16: copies are casts, queued on one stream."""

    def gradients_final(self, start, stop):
        self.exchanged.gradients[start:stop][:] = self.model.gradients[start:stop]
        self.strategy.gradients_final(start, stop)

    def _bring(self, start, stop):
        self.rounded.store(start, self.exchanged.parameters[start:stop])


class HostBridge(Bridge):
    """The exchange buffers are in host memory: gradients are copied down during backward, parameters up before use.

    The strategy learns that gradients are final when their copy is complete. `progress` tests for that; only `update`
    waits. A strategy that does not keep gradients also gathers parameters, and all ranks must start their exchanges in
    the same order. So it learns of a final range at a fixed point: when the next range becomes final, or for the last
    range immediately. From then on the range's place in host memory and on the GPU may be overwritten.
    """

    def __init__(self, strategy, model: FlatPair, exchanged: FlatPair, tracer, rounded, staging: HostStaging):
        super().__init__(strategy, model, exchanged, tracer, rounded)
        self.staging = staging
        self.on_the_way = []  # (start, stop, copy) of gradients, in the order in which they became final
        self.last_upload = self.before_update = staging.computed()
        for flat in (exchanged.parameters, exchanged.gradients):
            for array in flat.memory if isinstance(flat, Slots) else [flat]:
                staging.pin(array)

    def before_use(self, start, stop):
        if self.place_of is not None:
            wait(self.last_upload)  # the next gather overwrites this place in host memory
        super().before_use(start, stop)

    def _bring(self, start, stop):
        # A range's own place is free after the work queued before the update, a shared place after the work queued now.
        is_free = self.before_update if self.place_of is None else self.staging.computed()
        host = self.exchanged.parameters[start:stop]
        if self.rounded is None:
            self.last_upload = self.staging.into(host, self.model.parameters[start:stop], is_free)
        else:
            self.last_upload = self.staging.through(
                host, lambda low, values: self.rounded.store(start + low, values), is_free
            )
        self.staging.before_compute(self.last_upload)

    def gradients_final(self, start, stop):
        if not self.traits.keeps_gradients:
            self._make_room()
        copy = self.staging.out(self.model.gradients[start:stop], self.exchanged.gradients[start:stop])
        self.on_the_way.append((start, stop, copy))
        if start == 0 and not self.traits.keeps_gradients:  # the next backward overwrites this place first
            self._make_room()

    def _make_room(self):
        with self.tracer.interruption("copy_out"):
            self._land_all()

    def progress(self):
        if self.traits.keeps_gradients:
            self._land()
        self.strategy.progress()

    def update(self, lr):
        with self.tracer.phase("copy_out", bytes=4 * sum(stop - start for start, stop, _ in self.on_the_way)):
            self._land_all()
        self.before_update = self.staging.computed()
        return super().update(lr)

    @contextmanager
    def evaluated(self):
        """Copy the other parameters to the model for this context, and the replica's own for the next step."""
        with self.strategy.evaluated():
            self._forget_uploads()
            yield
            self._forget_uploads()

    def _forget_uploads(self) -> None:
        if self.traits.takes_local_steps:
            wait(self.last_upload)
            self.there.clear()
            self.before_update = self.staging.computed()

    def _land(self) -> bool:
        """Tell the strategy which copies of gradients are complete. Return whether any were."""
        count = len(self.on_the_way)
        while self.on_the_way and self.on_the_way[0][2].Test():
            start, stop, _ = self.on_the_way.pop(0)
            self.strategy.gradients_final(start, stop)
        return len(self.on_the_way) < count

    def _land_all(self):
        """Wait until all copies of gradients are complete; meanwhile advance exchanges that have started."""
        pauses = Pauses()
        while self.on_the_way:
            if self._land():
                pauses.happened()
            else:
                pauses.sleep()
            self.strategy.progress()
