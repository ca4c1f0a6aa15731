"""Seconds to a validation loss: the arithmetic, the table and the figure; names of strategies with options."""

import numpy as np
import pytest

from dist.wire import WIRE_BYTES
from gpt2.errors import UserError
from scripts import compare
from scripts.prediction.run_prediction import own_schedule
from scripts.reports import by_time
from strategies import STRATEGIES
from tests.support.drawn import is_inside, title_of, top_of
from tests.support.make_run import three_ranks, write_run
from traces import read_run
from traces.plots import loss_over_time
from traces.verdict.curves import compare_curves
from traces.verdict.summary import measure_runs
from traces.verdict.time_to_loss import Curve, cells, curve_of, headline, reach, seconds_to_loss

pytestmark = pytest.mark.any_mpi


def log(step_s, losses, every=2):
    """Steps of step_s seconds, the first one of a minute; a validation after every second step."""
    rows = [{"step": step, "loss": 5.0, "step_s": step_s} for step in range(1, every * len(losses) + 1)]
    rows[0]["step_s"] = 60.0
    for place, loss in enumerate(losses, 1):
        rows[every * place - 1]["val_loss"] = loss
    return rows


def curves(step_s, *seeds):
    return [curve_of(log(step_s, losses)) for losses in seeds]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((4.0, 3.0, 2.0), (30.0, 15.0)),  # half the way from the second validation to the third
        ((4.0, 2.5, 2.0), (20.0, 10.0)),  # at a validation
        ((4.0, 2.6, 2.2), (25.0, 12.5)),  # a quarter of the way from 20 s to 40 s
        ((2.0, 1.5, 1.0), (10.0, 5.0)),  # before the first validation, nobody knows when
        ((4.0, 2.0, 3.0), (17.5, 8.75)),  # it rises later
        ((4.0, 3.0, 2.6), None),
        ((), None),
    ],
)
def test_seconds_to_a_loss_by_hand(losses, expected):
    seconds = np.array([10.0, 20.0, 40.0])[: len(losses)]
    found = seconds_to_loss(seconds / 2, seconds, np.array(losses), 2.5)
    assert found == (expected and pytest.approx(expected))


def test_a_curve_has_the_seconds_of_its_steps_without_the_start():
    (one,) = curves(0.5, (4.0, 3.0))
    assert one.steps.tolist() == [2, 4]
    assert one.seconds.tolist() == [1.0, 2.0], "the first step, of a minute, counts as the second"
    assert one.step_s == 0.5
    slower = one.with_steps_of(3.0)
    assert slower.seconds.tolist() == [6.0, 12.0]
    assert (slower.losses is one.losses, slower.step_s) == (True, 3.0)


GROUPS = {
    "exact": curves(12.0, (4.0, 3.0, 2.0), (4.0, 3.5, 1.5), (4.0, 3.0, 2.0)),
    "quick": curves(1.0, (4.0, 3.0, 2.0), (4.0, 3.0, 2.2), (4.0, 3.0, 1.0)),
    "never": curves(1.0, (4.0, 3.0, 2.9), (4.0, 3.0, 2.0), (4.0, 3.0, 2.9)),
}


def test_the_table_has_the_spread_over_seeds():
    exact, quick, never = cells(reach(GROUPS, 2.5))
    assert exact == ["exact", "60.0 (60.0 to 60.0)", "5 (5 to 5)", "12000 (12000 to 12000)", "2.000 (1.500 to 2.000)"]
    assert quick[1] == "5.00 (4.50 to 5.25)"
    assert quick[4] == "2.000 (1.000 to 2.200)"
    assert never[1:3] == ["not reached by 2 of 3 seeds", "-"]
    assert cells(reach({"one": GROUPS["quick"][:1], "none": GROUPS["never"][:1]}, 2.5)) == [
        ["one", "5.00", "5", "1000", "2.000"],
        ["none", "not reached", "-", "1000", "2.900"],
    ]


def test_the_headline_names_the_first_and_those_within_its_spread():
    assert headline(reach(GROUPS, 2.5), 2.5) == "quick reaches loss 2.5 first: 5.00 s, 12.0 times faster than exact"
    tie = GROUPS | {"like quick": curves(1.02, *[one.losses for one in GROUPS["quick"]])}
    assert headline(reach(tie, 2.5), 2.5).startswith("quick and like quick reach loss 2.5 first: 5.00 s and 5.10 s, 12")
    assert headline(reach(GROUPS, 0.1), 0.1) == "No strategy reaches loss 0.1"
    assert headline(reach({"quick": GROUPS["quick"]}, 2.5), 2.5) == "quick reaches loss 2.5 first: 5.00 s"


def test_the_figure_marks_where_each_reaches_the_loss():
    figure = loss_over_time.draw({"": GROUPS}, 2.5, ["2 ranks"])
    assert title_of(figure) == "quick reaches loss 2.5 first: 5.00 s, 12.0 times faster than exact"
    assert "3 seeds" in top_of(figure)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log", "72 s and 6 s"
    assert [text.get_text() for text in axes.texts] == ["loss 2.5", "5.00 s", "60 s"]
    assert [text.xy[0] for text in axes.texts[1:]] == [5.0, 60.0]
    assert is_inside(figure)


def test_a_panel_for_each_rate():
    slow = {name: [one.with_steps_of(20.0) for one in seeds] for name, seeds in GROUPS.items()}
    slow["quick"] = [one.with_steps_of(40.0) for one in slow["quick"]]
    figure = loss_over_time.draw({"20 Mbit/s": slow, "100 Mbit/s": GROUPS, "400 Mbit/s": GROUPS}, 2.5)
    assert title_of(figure) == "First to loss 2.5: exact at 20 Mbit/s; quick at 100 Mbit/s and 400 Mbit/s"
    assert [axes.get_title("left") for axes in figure.axes] == ["20 Mbit/s", "100 Mbit/s", "400 Mbit/s"]
    assert {axes.get_xscale() for axes in figure.axes} == {"log"}
    assert {axes.get_xlim() for axes in figure.axes} == {figure.axes[0].get_xlim()}, "the same axis"
    assert is_inside(figure)
    long = {f"{name}/with-a-long-option={place}/bfloat16": GROUPS["quick"] for place, name in enumerate("abcdef")}
    figure = loss_over_time.draw({"": long}, 2.5)
    assert is_inside(figure)
    assert figure.axes[0].get_xscale() == "linear"
    assert is_inside(loss_over_time.draw({"": {"empty": [Curve(*np.empty((3, 0)), 1.0)]}}, 2.5))


# --- names ---


def test_options_behind_a_name_become_flags():
    assert compare.strategy_flags("ring/bfloat16/op=own/low-rank=4") == [
        "--strategy", "ring", "--wire", "bfloat16", "--op", "own", "--low-rank", "4"
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"no option 'fast', expected .*overlap or NAME=VALUE"):
        compare.strategy_flags("ring/fast")


def test_folders_have_safe_names(tmp_path):
    assert compare.seed_folder(tmp_path, "ring/outer-lr=0.7/x=../a b", 3).name == "ring-outer-lr-0.7-x-..-a-b-seed-3"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--seeds 1", "--seeds belongs to --by-time"),
        ("--by-time 2 --rounds 3", "--rounds to a comparison without it"),
        ("--by-time 2 --seeds 1,a", "argument --seeds: invalid"),
        ("--nodes 2", "--nodes and --rate go together"),
    ],
)
def test_flags_that_contradict(flags, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare.py", *flags.split()])
    with pytest.raises(SystemExit):
        compare.main()
    assert says in capsys.readouterr().err


# --- runs that give other weights ---


def made(folder, same_weights, *losses):
    rows = [{"step": step, "loss": loss, "val_loss": loss + 1} for step, loss in enumerate(losses, 1)]
    path = write_run(folder, three_ranks(), [0, 0, 1], log=rows)
    config = (path / "config.json").read_text()
    value = str(same_weights).lower()
    (path / "config.json").write_text(config.replace("{", f'{{"same_weights": {value}, ', 1))
    return path


def compared(*paths):
    return compare_curves(measure_runs([read_run(path) for path in paths], own_schedule))


def test_runs_of_other_arithmetic_are_not_accused(tmp_path):
    exact, other, faulty = (
        made(tmp_path / name, name != "other", 5.0, last)
        for name, last in (("exact", 4.0), ("other", 4.4), ("faulty", 4.2))
    )
    found = compared(exact, other)
    assert (found.kind, found.subtitle) == (
        "other",
        "last validation loss (mean distance of the training losses from reduce-bcast (exact)'s): "
        "reduce-bcast (exact) 5.000, reduce-bcast (other) 5.400 (2.0e-01)",
    )  # fmt: skip
    assert found.title == "Different arithmetic: the losses are compared, not expected to agree"
    assert compared(exact, other, faulty).kind == "differ", "the other two must agree"
    assert by_time.inexact({"a": {"same_weights": True}}) == []
    assert by_time.inexact({"a": {"same_weights": True}, "b": {"same_weights": False}})[0].endswith(": b")


def test_coarse_formats_do_not_give_the_same_weights():
    traits = STRATEGIES["hierarchical"].traits
    assert [traits.gives_same_weights(WIRE_BYTES[wire]) for wire in WIRE_BYTES] == [True, True, False]
