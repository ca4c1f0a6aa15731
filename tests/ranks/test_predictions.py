"""Predictions of all strategies in one call, and ZeRO's exchanges against what its strategies do."""

from itertools import pairwise, product

import numpy as np
import pytest
from dist.cost.predictions import Link, predicted_exchange_s, predicted_exchanges
from dist.cost.schedules import SCHEDULES
from dist.cost.zero_schedules import zero_2_steps, zero_3_steps

LINK = Link(50e6, 0.0, nominal=False)


def test_every_strategy_in_one_call():
    found = predicted_exchanges([2, 2, 2, 2, 1], 8_000_000, LINK)
    assert list(found) == list(SCHEDULES)
    assert found["hierarchical"].seconds == pytest.approx(1.6 * 8e6 / 50e6)
    np.testing.assert_allclose(found["hierarchical"].bytes_in, 1.6 * 8e6, rtol=1e-5)
    half = predicted_exchanges([2, 2, 2, 2, 1], 8_000_000, LINK, wire="bfloat16")
    assert half["hierarchical"].seconds == pytest.approx(0.8 * 8e6 / 50e6)
    assert predicted_exchanges([1] * 9, 64_000_000, LINK, "openmpi")["reduce-scatter"] is None


def test_a_slow_port_holds_up_one_direction():
    """A ring takes as long as its slowest port's in; a leader's out counts as much."""
    slow_in = {2: (5e6, 50e6)}
    assert predicted_exchange_s("ring", [1] * 4, 8_000_000, LINK, node_rates=slow_in) == pytest.approx(1.5 * 8e6 / 5e6)
    slow_out = predicted_exchange_s("hierarchical", [2, 2], 8_000_000, LINK, node_rates={1: (50e6, 10e6)})
    assert slow_out == pytest.approx(8e6 / 10e6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout": [2, 0]}, "1 or more"),
        ({"wire": "int8"}, "float32, bfloat16"),
        ({"node_rates": {7: (1.0, 1.0)}}, "nodes 0 to 1"),
        ({"node_rates": {0: (0.0, 1.0)}}, "above 0"),
        ({"ranges": (1, 2)}, "ranges that make up"),
    ],
)
def test_mistakes(changes, said):
    with pytest.raises(ValueError, match=said):
        predicted_exchanges(**{"layout": [1, 1], "size_bytes": 8000, "link": LINK} | changes)


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


@pytest.mark.ranks(1, 2)
def test_zero_exchanges_what_its_strategies_do(comm, monkeypatch):
    from dist.world import start_world

    world = start_world()
    for layers, micro_steps in product((1, 2, 3, 5), (1, 2, 3)):
        assert_exchanges(world, layers, micro_steps, monkeypatch)


def assert_exchanges(world, layers, micro_steps, monkeypatch):
    from strategies import STRATEGIES, Job
    from traces import Tracer

    sizes = [6, *[4] * layers, 2]
    stops = np.cumsum([0, *sizes]).tolist()
    ranges = tuple(pairwise(stops))
    for name, steps in (("zero-2", zero_2_steps), ("zero-3", zero_3_steps)):
        kind = STRATEGIES[name]
        recorded = Recorded(list(ranges))
        monkeypatch.setattr(kind, "_all_gather", recorded.note("all-gather"))
        monkeypatch.setattr(kind, "_reduce_scatter", recorded.note("reduce-scatter"))
        buffers = kind.buffers(world, stops[-1], ranges)
        strategy = kind(Job(world, buffers, lambda start, stop: NoUpdate(), lambda flat: 0.0, 0.0, Tracer()))
        for _ in range(micro_steps):
            for part in ranges:
                strategy.before_use(*part)
            for part in reversed(ranges):
                strategy.before_use(*part)
                strategy.gradients_final(*part)
        strategy.update(0.0)
        assert recorded.steps == steps(len(ranges), micro_steps)
