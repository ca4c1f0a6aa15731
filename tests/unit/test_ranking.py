"""Which strategy is fastest: the rule that tells a winner from noise, and the order of the rounds."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from scripts import compare
from scripts.plot import measure_rounds
from tests.support.drawn import is_inside, title_of
from tests.support.make_run import simulate, write_run
from traces import read_run
from traces.plots import comparison
from traces.verdict import ranking

NAMES = ("reduce-bcast", "sliced", "reduce-scatter")
ROUNDS = 4


def figures_of(label, rounds_ms):
    """A summary as far as the ranking needs it."""
    its = [{"step_ms": float(ms), "tokens_per_s": 1e6 / ms, "tokens_per_step": 1e3} for ms in rounds_ms]
    middle = float(np.median(rounds_ms))
    both = {"label": label, "exchanges": True, "exchange_share": 0.5, "tokens_per_step": 1e3}
    return both | {"step_ms": middle, "tokens_per_s": 1e6 / middle, "rounds": its}


def drawn(random, times_ms, noise, rounds=ROUNDS):
    """Rounds with the noise of a shared machine: each step time a little off, and one round in five much longer."""
    shape = len(times_ms), rounds
    factors = np.exp(random.normal(0, noise, shape)) * np.where(random.random(shape) < 0.2, 1.5, 1.0)
    return [figures_of(name, row) for name, row in zip(NAMES, np.array(times_ms)[:, None] * factors, strict=False)]


def winners(times_ms, noise, draws, rounds=ROUNDS):
    random = np.random.default_rng(7)
    best = [ranking.fastest(drawn(random, times_ms, noise, rounds)) for _ in range(draws)]
    return Counter(tied[0]["label"] if len(tied) == 1 else "a tie" for tied in best)


@pytest.mark.parametrize("noise", [0.03, 0.2])
def test_of_equal_strategies_none_wins(noise):
    assert ranking.chance(3, ROUNDS) == pytest.approx(1 / 165)
    found = winners([200, 200, 200], noise, 200)
    assert found["a tie"] >= 200 - 4  # 1.2 expected, and five or more once in a hundred such tests


@pytest.mark.parametrize(("count", "rounds"), [(3, 4), (2, 4), (3, 2)])
def test_the_stated_chance_is_how_often_the_rule_errs(count, rounds):
    draws = 4000
    found = winners([200] * count, 0.2, draws, rounds)
    expected = ranking.chance(count, rounds) * draws
    assert draws - found["a tie"] == pytest.approx(expected, abs=4 * expected**0.5 + 0.1 * expected)


def test_a_clearly_faster_one_is_named():
    found = winners([430, 330, 200], 0.03, 200)
    assert set(found) <= {"reduce-scatter", "a tie"}
    assert found["reduce-scatter"] >= 190


def test_a_slightly_slower_one_wins_as_rarely_as_an_equal_one():
    found = winners([210, 330, 200], 0.1, 200)
    assert found["reduce-bcast"] <= 4
    assert found["sliced"] == 0


def test_what_is_said():
    slow, near = figures_of("sliced", [300, 310, 305, 320]), figures_of("ring", [198, 215, 204, 210])
    best = figures_of("tree", [190, 200, 199, 201])
    assert ranking.verdict([slow, near, best]) == "a tie: tree and ring, 200 and 207 ms a step"
    assert ranking.grounds([slow, near, best]) == "4 rounds: they overlap (190 to 201, 198 to 215 ms); sliced is slower"
    assert ranking.verdict([slow, best]) == "fastest: tree, 200 ms a step (1.5 times faster than sliced)"
    assert ranking.grounds([slow, best]).endswith(
        "if all were equally fast, that would happen by chance once in 35 times"
    )
    # Sure, but no reason to choose the one or the other.
    close = figures_of("allreduce", [202, 203, 202.5, 202])
    assert ranking.verdict([close, best]).startswith("no difference: tree and allreduce both take ")


def test_the_plot_and_table_of_rounds(tmp_path):
    """Three rounds of two strategies: one bar each, at the median of the rounds, a circle for every round."""
    nodes, runs = [0, 0, 1], []
    for number in range(3):
        for name in ("reduce-bcast", "reduce-scatter"):
            spans = simulate(name, nodes, steps=8, seed=number)
            runs.append(read_run(write_run(tmp_path / f"{name}-{number}", spans, nodes, name)))
    measured = measure_rounds(runs, 3)
    assert [one.label for one in measured] == ["reduce-bcast", "reduce-scatter"]
    for one in measured:
        its = [figures["step_ms"] for figures in one.figures["rounds"]]
        assert one.figures["step_ms"] == pytest.approx(np.median(its))
    figure = comparison.draw_comparison(measured)
    assert title_of(figure).startswith("Fastest: reduce-scatter, ")
    assert is_inside(figure)
    circles = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in circles] == [3, 3]


def test_a_tie_is_the_title(tmp_path):
    """The same strategy twice."""
    nodes, runs = [0, 0, 1], []
    for number in range(2):
        for name in "ab":
            spans = simulate("allreduce", nodes, steps=8, seed=number)
            runs.append(read_run(write_run(tmp_path / f"{name}-{number}", spans, nodes, "allreduce")))
    measured = measure_rounds(runs, 2)
    measured[0].figures["rounds"][0]["step_ms"] *= 1.2
    measured[0].figures["step_ms"] *= 1.1
    figure = comparison.draw_comparison(measured)
    assert title_of(figure).startswith("A tie: allreduce (b-0) and allreduce (a-0), ")
    assert is_inside(figure)


def test_the_rounds_take_turns():
    order = [name for _, name in compare.in_turns(list("abc"), 4)]
    assert "".join(order) == "abccbaabccba"
    assert [at for at, _ in compare.in_turns(["a", "b"], 2)] == [1, 1, 2, 2]


def test_the_first_rounds_folders_are_the_strategies():
    names = [compare.run_folder(Path("out"), "reduce-bcast/dedicated", number).name for number in (1, 2)]
    assert names == ["reduce-bcast-dedicated", "reduce-bcast-dedicated-round-2"]


def test_a_training_of_the_users_own_is_not_repeated_unasked():
    assert compare.default_rounds(["ring", "tree"], compare.DEFAULT_TRAINING) == 4
    assert compare.default_rounds(["ring", "tree"], ["--steps", "1000"]) == 1
    assert compare.default_rounds(["ring"], compare.DEFAULT_TRAINING) == 1
