"""Where the draws of random rounding begin, and which parameters an update has rounded."""

import numpy as np
import pytest

from gpt2.rounding import SPLITMIX64_STEP, RoundedParameters, splitmix64, step_seed

# Vigna's splitmix64.c from 1234567 on.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_splitmix64_is_the_published_one():
    assert [splitmix64((1234567 + n * SPLITMIX64_STEP) % 2**64) for n in range(5)] == PUBLISHED


def test_no_step_of_one_seed_is_a_step_of_another():
    """Else two runs with neighbouring seeds would draw alike, a step apart."""
    assert len({step_seed(seed, step) for seed in range(30) for step in range(30)}) == 900


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ([], [(0, 100)]),
        ([(0, 100)], []),
        ([(60, 80), (10, 20)], [(0, 10), (20, 60), (80, 100)]),
        ([(0, 50), (10, 20)], [(50, 100)]),
        ([(90, 200)], [(0, 90)]),
    ],
)
def test_what_no_update_has_written_is_missing(written, missing):
    rounded = RoundedParameters(np.zeros(200, np.float32), None, seed=1)
    for start, stop in written:
        rounded.target(start, stop)
    assert rounded.missing(0, 100) == missing


def test_every_update_draws_anew():
    stored = []
    rounded = RoundedParameters(np.zeros(8), lambda *call: stored.append(call[2:]), seed=3, step=5)
    rounded.target(0, 8)
    for step in (6, 7):
        rounded.begin_update()
        rounded.store(2, np.zeros(4))
        assert stored.pop() == (step_seed(3, step), 2)
        assert rounded.missing(0, 8) == [(0, 8)]
    assert RoundedParameters(np.zeros(8), None).rounding_seed is None
