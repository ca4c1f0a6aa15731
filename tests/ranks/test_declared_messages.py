"""The messages that ZeRO's strategies declare, against what they exchange."""

from itertools import pairwise, product

import numpy as np
import pytest

from dist.world import start_world
from gpt2.optimizer import Clipping
from strategies import STRATEGIES, Job, zero_2, zero_3
from traces import Tracer


class NoUpdate:
    def update(self, parameters, gradients, lr, scale):
        """As an optimizer that changes nothing."""


class Recorded:
    """Stands in for what a ZeRO strategy starts: the ranges in their order."""

    def __init__(self, ranges):
        self.ranges, self.steps = ranges, []

    def note(self, what):
        def started(_, start, stop):
            self.steps.append((what, self.ranges.index((start, stop))))
            return iter(())

        return started


@pytest.mark.ranks(2)
def test_zero_exchanges_what_its_strategies_do(comm, monkeypatch):
    world = start_world()
    for layers, micro_steps in product((1, 2, 3, 5), (1, 2, 3)):
        assert_exchanges(world, layers, micro_steps, monkeypatch)


def assert_exchanges(world, layers, micro_steps, monkeypatch):
    sizes = [6, *[4] * layers, 2]
    stops = np.cumsum([0, *sizes]).tolist()
    ranges = tuple(pairwise(stops))
    for name, steps in (("zero-2", zero_2.ranges_exchanged), ("zero-3", zero_3.ranges_exchanged)):
        kind = STRATEGIES[name]
        recorded = Recorded(list(ranges))
        monkeypatch.setattr(kind, "_all_gather", recorded.note("all-gather"))
        monkeypatch.setattr(kind, "_reduce_scatter", recorded.note("reduce-scatter"))
        buffers = kind.traits.buffers(world, stops[-1], ranges)
        strategy = kind(Job(world, buffers, lambda start, stop: NoUpdate(), lambda flat: 0.0, Clipping(0.0), Tracer()))
        for _ in range(micro_steps):
            for part in ranges:
                strategy.before_use(*part)
            for part in reversed(ranges):
                strategy.before_use(*part)
                strategy.gradients_final(*part)
        strategy.update(0.0)
        assert recorded.steps == steps(len(ranges), micro_steps)
