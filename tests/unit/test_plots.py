"""What scripts/plot.py shows: the figures, drawn from runs whose times are known, and the command."""

import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from scripts.prediction.run_prediction import own_schedule
from tests.support.drawn import is_inside, title_of
from tests.support.make_run import simulate, three_ranks, write_run
from traces import RunError, read_run
from traces.plots import comparison, look, loss_curves, timeline
from traces.plots.lanes import lanes_of
from traces.verdict.summary import measure_runs

# --- figures ---

NINE = [0, 1, 1, 2, 2, 3, 3, 4, 4]
STRATEGIES = ("reduce-bcast", "sliced", "reduce-scatter", "none")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four strategies on 9 ranks of 5 nodes: the folders."""
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / name, simulate(name, NINE), NINE, name) for name in STRATEGIES]


@pytest.fixture(scope="module")
def measured(runs):
    return measure_runs([read_run(path) for path in runs], own_schedule)


@pytest.mark.parametrize("draw", [comparison.draw_phases, loss_curves.draw, comparison.draw_comparison])
def test_nothing_leaves_the_picture(measured, draw, tmp_path):
    """Of one run, of several, and of one with all options of its strategy in its label."""
    options = {"wire": "bfloat16", "overlap": True}
    path = write_run(tmp_path / "run", simulate("reduce-scatter", NINE), NINE, "hierarchical-sharded", **options)
    (longest,) = measure_runs([read_run(path)], own_schedule)
    assert longest.label == "hierarchical-sharded bfloat16 overlap"
    for runs in (measured, measured[:1], [longest, *measured]):
        assert is_inside(draw(runs))
    assert all(is_inside(timeline.draw(one)) for one in measured)


def test_the_comparison_names_the_fastest_and_orders_from_slow_to_fast(measured):
    figure = comparison.draw_comparison(measured)
    assert title_of(figure).startswith("Fastest: reduce-scatter, ")
    bars, *lanes = figure.axes
    labels = [label.get_text() for label in bars.get_yticklabels()]
    assert labels == ["reduce-bcast", "sliced", "reduce-scatter", "none (no exchange)"]
    # The control's ranks run apart, so that it has no timeline; all others share the bars' scale.
    assert [axes.get_title("left").split(", step")[0] for axes in lanes] == labels[:3]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_bars_are_as_high_as_the_medians(measured):
    axes = comparison.draw_phases(measured).axes[0]
    tops = {}
    for bar in axes.patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        tops[place] = max(tops.get(place, 0), bar.get_y() + bar.get_height())
    # Medians of parts add up to the median of the step but for the noise between steps.
    assert [tops[place] for place in range(4)] == pytest.approx([one.figures["step_ms"] for one in measured], rel=0.01)


def test_the_timeline_draws_each_ranks_spans_where_they_were(tmp_path):
    (one,) = measure_runs([read_run(write_run(tmp_path, three_ranks(3), [0, 0, 1]))], own_schedule)
    axes = timeline.draw(one).axes[0]
    drawn = {
        (matplotlib.colors.to_hex(bars.get_facecolor()[0]), *path.get_extents().get_points().round(2).flatten())
        for bars in axes.collections
        for path in bars.get_paths()
    }
    # Step 1: rank 2's forward, then the root's reduce without its waiting (30 to 50), and that waiting (10 to 30).
    assert (look.SKY.lower(), 0, 1.61, 30, 2.39) in drawn
    assert (look.VERMILLION.lower(), 30, -0.39, 50, 0.39) in drawn
    assert (look.COLOUR["waiting"].lower(), 10, -0.39, 30, 0.39) in drawn
    assert axes.get_xlim() == pytest.approx((0, 284))


def test_a_timeline_skips_over_untraced_steps(tmp_path):
    spans = [[span for span in rank if span[0] != 2] for rank in three_ranks(3)]
    (one,) = measure_runs([read_run(write_run(tmp_path, spans, [0, 0, 1]))], own_schedule)
    assert timeline.draw(one).axes[0].get_xlim() == pytest.approx((0, 84))


def losses(*pairs):
    return [{"step": step, "loss": loss} for step, loss in pairs]


@pytest.mark.parametrize(
    ("second", "title"),
    [
        (losses((1, 5.0), (2, 4.0005)), "The same loss curve from both runs"),
        (losses((1, 5.0), (2, 4.1)), "The loss curves differ"),
        (losses((7, 5.0)), "The runs have no step in common: their losses are not compared"),
    ],
)
def test_the_loss_plot_says_whether_curves_agree(tmp_path, second, title):
    logs = {"a": losses((1, 5.0), (2, 4.0)), "b": second}
    paths = [write_run(tmp_path / name, three_ranks(), [0, 0, 1], log=log) for name, log in logs.items()]
    assert title_of(loss_curves.draw(measure_runs([read_run(path) for path in paths], own_schedule))) == title


def test_the_loss_plot_needs_a_loss(tmp_path):
    run = read_run(write_run(tmp_path, three_ranks(), [0, 0, 1], log=[]))
    with pytest.raises(RunError, match="holds no loss"):
        loss_curves.draw(measure_runs([run], own_schedule))


def test_smoothing_is_narrow_at_the_start_and_one_sided_at_the_end():
    values = np.array([4.0, 1.0, 7.0, 4.0, 9.0])
    assert loss_curves.smooth(values, 3) == pytest.approx([4, 4, 4, 20 / 3, 6.5])
    assert loss_curves.smooth(values, 1) == pytest.approx(values)


def test_the_same_run_gives_the_same_svg_and_leaves_no_setting_behind(measured, tmp_path):
    before = dict(matplotlib.rcParams)
    first, second = (look.save(comparison.draw_phases(measured), tmp_path / name)[1].read_bytes() for name in "ab")
    assert first == second
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("MPICH Version:      5.0.1\nMPICH Release date: Mon", "MPICH 5.0.1"),
        ("Open MPI v5.0.8, package: Open MPI root@x, ident: 5.0.8", "Open MPI 5.0.8"),
        ("", "unknown MPI"),
    ],
)
def test_the_library_in_the_footnote(text, short):
    assert look.short_library(text) == short


# --- scripts/plot.py ---


def plot(*arguments):
    script = Path(__file__).parents[2] / "scripts" / "plot.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


def check_figures(folder, names, printed):
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{n}.{kind}" for n in names for kind in ("png", "svg")
    )
    for path in folder.iterdir():
        assert str(path) in printed
        if path.suffix == ".png":
            pixels = matplotlib.image.imread(path)[..., :3]
            assert min(pixels.shape[:2]) > 300
            # Not blank: it shows the blue of backward, or a curve in it.
            assert (np.abs(pixels - 1).max(axis=2) > 0.1).mean() > 0.02
        else:
            assert path.read_text().rstrip().endswith("</svg>")


def test_one_run_and_several(runs, tmp_path):
    out = tmp_path / "figures"
    of_one = ["timeline", "phases", "loss", "messages", "ranks", "waits", "whole-run"]
    of_two = ["comparison", "phases", "loss", "timeline-reduce-bcast", "timeline-reduce-scatter"]
    for arguments, folder, names, ends in (
        ([runs[0]], runs[0] / "plots", of_one, "reduce-bcast: "),
        ([runs[0], runs[2], "--out", out], out, of_two, "fastest: reduce-scatter, "),
    ):
        result = plot(*arguments)
        assert result.returncode == 0, result.stderr
        check_figures(folder, names, result.stdout)
        assert result.stdout.splitlines()[-1].startswith(ends)


def test_runs_of_one_strategy_are_told_apart_by_folder(tmp_path):
    paths = [write_run(tmp_path / name, three_ranks(), [0, 0, 1]) for name in ("float32", "bfloat16")]
    labels = [one.label for one in measure_runs([read_run(path) for path in paths], own_schedule)]
    assert labels == ["reduce-bcast (float32)", "reduce-bcast (bfloat16)"]


def test_a_wrong_folder_is_one_line_and_status_2(tmp_path):
    result = plot(tmp_path / "nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("plot.py: error: ")
    assert result.stderr.count("\n") == 1


def test_what_follows_the_last_step_shown_is_no_part_of_it(tmp_path):
    """A checkpoint has the number of the step before it; between two steps that are shown it stays."""
    spans = three_ranks(4)
    for rank in spans:
        for step in (3, 4):
            end = max(span[4] for span in rank if span[0] == step)
            rank.append((step, "checkpoint", -1, end, end + 0.5))
        rank.sort(key=lambda span: span[4])
    (one,) = measure_runs([read_run(write_run(tmp_path, spans, [0, 0, 1]))], own_schedule)
    last = len(one.times.steps) - 1
    assert "checkpoint" not in lanes_of(one, last, 1).parts
    assert "checkpoint" in lanes_of(one, last - 1, 2).parts
    assert "forward" in lanes_of(one, last, 1).parts
