"""What scripts/plot.py shows: the medians against times worked out by hand, the verdict, the figures, the command."""

import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from make_run import MS, simulate, three_ranks, write_run

from traces import RunError, comparison, files, look, loss_curves, phase_bars, read_run, timeline
from traces.analysis import measure, measure_runs, parts, summary
from traces.phases import INDEX, STEP
from traces.ranking import ratio_text, short_ms, table, verdict

# --- analysis ---


def test_seconds_per_step_rank_and_phase(tmp_path):
    times = measure(read_run(write_run(tmp_path, three_ranks(4), [0, 0, 1])))
    assert times.steps.tolist() == [1, 2, 3, 4]
    assert times.dropped == 0
    milliseconds = times.seconds[2] * 1e3
    assert milliseconds[:, INDEX["forward"]] == pytest.approx([10, 14, 30])
    assert milliseconds[:, INDEX["reduce"]] == pytest.approx([40, 31, 15])
    assert milliseconds[:, INDEX["update"]] == pytest.approx([10, 0, 0])
    assert milliseconds[:, INDEX["bcast"]] == pytest.approx([20, 35, 35])
    assert milliseconds[:, INDEX[STEP]] == pytest.approx([84, 84, 84])
    assert times.waiting[2, :, INDEX["reduce"]] * 1e3 == pytest.approx([20, 0, 0])
    assert times.waiting[2, :, INDEX["bcast"]] * 1e3 == pytest.approx([0, 15, 15])


def test_summary_adds_up_to_the_step(tmp_path):
    figures = summary(read_run(write_run(tmp_path, three_ranks(6), [0, 0, 1])))
    assert (figures["label"], figures["ranks"], figures["nodes"]) == ("reduce-bcast", 3, 2)
    assert (figures["steps"], figures["warm_up_dropped"]) == (4, 2)
    assert figures["step_ms"] == pytest.approx(84)
    # Means over the three ranks of the times in the test above.
    expected = {"forward": 18, "reduce": 86 / 3, "update": 10 / 3, "bcast": 30}
    assert figures["phases_ms"] == pytest.approx(expected)
    assert figures["waiting_ms"] == pytest.approx({"reduce": 20 / 3, "bcast": 10})
    assert figures["other_ms"] == pytest.approx(84 - 80)
    assert figures["exchange_share"] == pytest.approx((86 / 3 + 30) / 84)
    assert figures["waiting_share"] == pytest.approx((20 / 3 + 10) / 84)
    assert figures["tokens_per_s"] == pytest.approx(4096 / 0.084)
    cut = parts(figures)
    assert cut == pytest.approx(
        {"forward": 18, "reduce": 22, "update": 10 / 3, "bcast": 20, "waiting": 50 / 3, "other": 4}
    )
    assert sum(cut.values()) == pytest.approx(figures["step_ms"])


def one_rank(durations):
    """One rank, steps of these milliseconds one after the other, each all forward."""
    ends = np.cumsum(durations)
    return [
        [
            span
            for step, (start, end) in enumerate(zip(ends - durations, ends, strict=True), start=1)
            for span in ((step, "forward", -1, start, end), (step, STEP, -1, start, end))
        ]
    ]


def test_medians_leave_the_warm_up_out(tmp_path):
    durations = [500, 300, 12, 10, 14, 90, 13]
    run = read_run(write_run(tmp_path, one_rank(durations), [0]))
    times = measure(run)
    assert (times.dropped, times.steps.tolist()) == (2, [3, 4, 5, 6, 7])
    assert summary(run, times)["step_ms"] == pytest.approx(13)
    assert times.steps[times.representative()] == 7
    assert measure(run, warm_up=0).steps.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_few_steps_are_all_kept(tmp_path):
    times = measure(read_run(write_run(tmp_path, one_rank([500, 10, 11, 12]), [0])))
    assert (times.dropped, len(times.steps)) == (0, 4)


def test_what_lies_between_steps_is_in_no_step(tmp_path):
    spans = [[*three_ranks(2)[0], (1, "eval", -1, 184, 199)], *three_ranks(2)[1:]]
    times = measure(read_run(write_run(tmp_path, spans, [0, 0, 1])))
    assert times.seconds[:, :, INDEX["eval"]].max() == 0


def test_a_dedicated_server_that_does_not_compute(tmp_path):
    spans = three_ranks(3)
    spans[0] = [
        (step, phase, root, 100 * step if phase == "reduce" else start, end)
        for step, phase, root, start, end in spans[0]
        if phase != "forward"
    ]
    figures = summary(read_run(write_run(tmp_path, spans, [0, 0, 1], server="dedicated")))
    assert figures["label"] == "reduce-bcast dedicated"
    assert figures["phases_ms"]["forward"] == pytest.approx(44 / 3)
    assert figures["waiting_ms"]["reduce"] == pytest.approx(30 / 3)


def test_no_complete_step_is_an_error(tmp_path):
    spans = three_ranks()
    spans[2].pop()
    with pytest.raises(RunError, match="no step is complete on all 3 ranks"):
        measure(read_run(write_run(tmp_path, spans, [0, 0, 1])))


def test_many_records(tmp_path):
    ranks, steps = 16, 5000
    phases = ("forward", "backward", "reduce", "reduce", "reduce", "update", "bcast", "bcast", "bcast", STEP)
    records = np.zeros((steps, len(phases)), files.RECORD)
    records["step"] = np.arange(1, steps + 1)[:, None]
    records["phase"] = [INDEX[name] for name in phases]
    records["root"] = [{"reduce": 0, "bcast": 0}.get(name, -1) for name in phases]
    slot = np.array([*range(9), 0])
    records["start"] = (records["step"] * 10 + slot) * MS
    records["end"] = records["start"] + MS
    records["end"][:, -1] = records["start"][:, -1] + 9 * MS
    write_run(tmp_path, [[]] * ranks, [0] * ranks, log=[])
    for rank in range(ranks):
        with files.trace_path(tmp_path / "traces", rank).open("ab") as file:
            file.write(records.tobytes())
    figures = summary(read_run(tmp_path))
    assert figures["phases_ms"]["reduce"] == pytest.approx(3)
    assert figures["step_ms"] == pytest.approx(9)
    assert figures["tokens_per_s"] is None


# --- ranking ---


def figures_of(label, step_ms, tokens=1000.0):
    return {
        "label": label,
        "strategy": label,
        "step_ms": step_ms,
        "exchange_share": 0.5,
        "tokens_per_s": tokens / step_ms * 1e3,
        "tokens_per_step": tokens,
    }


def test_the_verdict_names_the_fastest():
    slow, fast = figures_of("reduce-bcast", 73.8), figures_of("reduce-scatter", 41.0)
    text = "fastest: reduce-scatter, 41 ms a step (1.8 times faster than reduce-bcast)"
    assert verdict([slow, fast]) == verdict([fast, slow]) == text
    assert verdict([slow]) == "reduce-bcast: 74 ms a step, 50% of it exchange"


def test_the_control_is_never_the_fastest():
    runs = [figures_of("none", 20.0), figures_of("sliced", 50.0), figures_of("allreduce", 40.0)]
    assert verdict(runs) == "fastest: allreduce, 40 ms a step (1.2 times faster than sliced)"


def test_different_batches_are_compared_by_tokens():
    # The dedicated server's step is shorter, but has fewer tokens in it.
    runs = [figures_of("reduce-bcast", 90.0, tokens=800.0), figures_of("sliced", 100.0, tokens=1000.0)]
    assert verdict(runs) == "fastest: sliced, 10,000 tokens/s (12% faster than reduce-bcast)"


def test_equal_runs_have_no_winner():
    assert verdict([figures_of("ring", 50.0), figures_of("tree", 50.4)]).startswith("no difference: ring and tree")


def test_texts_of_numbers():
    assert [short_ms(ms) for ms in (0.42, 4.21, 42.1, 421.4)] == ["0.4", "4.2", "42", "421"]
    assert [short_ms(ms, 3) for ms in (0.42, 4.21, 42.1, 421.4)] == ["0.42", "4.21", "42.1", "421"]
    assert [ratio_text(ratio) for ratio in (1.8, 1.08)] == ["1.8 times faster", "8% faster"]


def test_the_table_has_a_line_a_run_and_a_column_a_part():
    lines = table(
        [figures_of("ring", 50.0), figures_of("tree", 5.0)], [{"forward": 50.0}, {"backward": 5.0}]
    ).splitlines()
    assert [line.split() for line in lines] == [
        ["median", "ms", "forward", "backward", "step", "exchange", "tokens/s"],
        ["ring", "50.0", "-", "50.0", "50%", "20,000"],
        ["tree", "-", "5.00", "5.00", "50%", "200,000"],
    ]


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
    return measure_runs([read_run(path) for path in runs])


def title_of(figure):
    return figure.texts[0].get_text()


def is_inside(figure):
    """Whether all that is drawn, texts included, lies in the picture."""
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


@pytest.mark.parametrize("draw", [phase_bars.draw, loss_curves.draw, comparison.draw])
def test_nothing_leaves_the_picture(measured, draw):
    assert is_inside(draw(measured))
    assert is_inside(draw(measured[:1]))


def test_nothing_leaves_a_timeline(measured):
    assert all(is_inside(timeline.draw(one)) for one in measured)


def test_the_comparison_names_the_fastest_and_orders_from_slow_to_fast(measured):
    figure = comparison.draw(measured)
    assert title_of(figure).startswith("reduce-scatter is fastest: ")
    bars, *lanes = figure.axes
    labels = [label.get_text() for label in bars.get_yticklabels()]
    assert labels == ["reduce-bcast", "sliced", "reduce-scatter", "none (no exchange)"]
    # The control's ranks run apart, so that it has no timeline; all others share the bars' scale.
    assert [axes.get_title("left").split(":")[0] for axes in lanes] == labels[:3]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_bars_are_as_high_as_the_medians(measured):
    axes = phase_bars.draw(measured).axes[0]
    tops = {}
    for bar in axes.patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        tops[place] = max(tops.get(place, 0), bar.get_y() + bar.get_height())
    # Medians of parts add up to the median of the step but for the noise between steps.
    assert [tops[place] for place in range(4)] == pytest.approx([one.figures["step_ms"] for one in measured], rel=0.01)


def test_the_timeline_draws_each_ranks_spans_where_they_were(tmp_path):
    (one,) = measure_runs([read_run(write_run(tmp_path, three_ranks(3), [0, 0, 1]))])
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
    (one,) = measure_runs([read_run(write_run(tmp_path, spans, [0, 0, 1]))])
    assert timeline.draw(one).axes[0].get_xlim() == pytest.approx((0, 84))


def losses(*pairs):
    return [{"step": step, "loss": loss} for step, loss in pairs]


@pytest.mark.parametrize(
    ("second", "title"),
    [
        (losses((1, 5.0), (2, 4.0005)), "The same loss curve from both runs"),
        (losses((1, 5.0), (2, 4.1)), "The loss curves differ"),
        (losses((7, 5.0)), "The loss curves differ"),
    ],
)
def test_the_loss_plot_says_whether_curves_agree(tmp_path, second, title):
    logs = {"a": losses((1, 5.0), (2, 4.0)), "b": second}
    paths = [write_run(tmp_path / name, three_ranks(), [0, 0, 1], log=log) for name, log in logs.items()]
    assert title_of(loss_curves.draw(measure_runs([read_run(path) for path in paths]))) == title


def test_the_loss_plot_needs_a_loss(tmp_path):
    run = read_run(write_run(tmp_path, three_ranks(), [0, 0, 1], log=[]))
    with pytest.raises(RunError, match="holds no loss"):
        loss_curves.draw(measure_runs([run]))


def test_smoothing_keeps_ends_and_means():
    values = np.array([4.0, 1.0, 7.0, 4.0, 9.0])
    assert loss_curves.smooth(values, 3) == pytest.approx([4, 4, 4, 20 / 3, 9])
    assert loss_curves.smooth(values, 1) == pytest.approx(values)


def test_drawing_leaves_no_setting_behind(measured, tmp_path):
    before = dict(matplotlib.rcParams)
    look.save(timeline.draw(measured[0]), tmp_path / "timeline")
    assert dict(matplotlib.rcParams) == before


def test_the_same_run_gives_the_same_svg(measured, tmp_path):
    first, second = (look.save(phase_bars.draw(measured), tmp_path / name)[1].read_bytes() for name in "ab")
    assert first == second


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
    script = Path(__file__).parent.parent / "scripts" / "plot.py"
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


def test_one_run(runs):
    result = plot(runs[0])
    assert result.returncode == 0, result.stderr
    check_figures(runs[0] / "plots", ["timeline", "phases", "loss"], result.stdout)
    assert result.stdout.splitlines()[-1].startswith("reduce-bcast: ")


def test_several_runs(runs, tmp_path):
    result = plot(runs[0], runs[2], "--out", tmp_path / "figures")
    assert result.returncode == 0, result.stderr
    names = ["comparison", "phases", "loss", "timeline-reduce-bcast", "timeline-reduce-scatter"]
    check_figures(tmp_path / "figures", names, result.stdout)
    assert result.stdout.splitlines()[-1].startswith("fastest: reduce-scatter, ")


def test_runs_of_one_strategy_are_told_apart_by_folder(tmp_path):
    paths = [write_run(tmp_path / name, three_ranks(), [0, 0, 1]) for name in ("float32", "bfloat16")]
    labels = [one.label for one in measure_runs([read_run(path) for path in paths])]
    assert labels == ["reduce-bcast (float32)", "reduce-bcast (bfloat16)"]


def test_a_wrong_folder_is_one_line_and_status_2(tmp_path):
    result = plot(tmp_path / "nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("plot.py: error: ")
    assert result.stderr.count("\n") == 1


def test_help_shows_the_launch_lines():
    result = plot("--help")
    assert result.returncode == 0
    assert "python scripts/plot.py runs/sliced" in result.stdout
