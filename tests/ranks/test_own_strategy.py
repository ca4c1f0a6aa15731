"""The strategy in docs/own-strategy.md is one: it passes what the others pass."""

import re
from pathlib import Path

import numpy as np
import pytest

from dist.world import world_of
from strategies import STRATEGIES
from tests.ranks import test_strategies as small

PAGE = Path(__file__).parents[2] / "docs" / "own-strategy.md"


@pytest.mark.ranks(1, 2, 4)
def test_the_pages_strategy_is_one_serial_rank(comm, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 45
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    monkeypatch.setitem(STRATEGIES, "chain", names["Chain"])
    world, (expected, losses, norms) = world_of(comm, comm.Split(comm.rank // 2, comm.rank)), small.serial()
    first, *numbers, _ = small.distributed(world, "chain")
    again, *_ = small.distributed(world, "chain")
    np.testing.assert_array_equal(again, first)
    np.testing.assert_allclose(first, expected, atol=1e-5)
    np.testing.assert_allclose(numbers, (losses, norms), rtol=1e-4)
    assert len(set(comm.allgather(first.tobytes()))) == 1
