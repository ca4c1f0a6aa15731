"""Seconds by step, rank and phase, waits, medians and the verdict, against hand-computed runs."""

import json

import numpy as np
import pytest

from tests.support.make_run import three_ranks, write_run
from traces import RunError, read_run
from traces.read.analysis import measure
from traces.record.phases import INDEX, STEP
from traces.units import bytes_text, mfu_text, ratio_text, seconds_text, short_count, short_ms
from traces.verdict.ranking import verdict
from traces.verdict.summary import parts, summary, table


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
    assert figures["tokens_per_s"] == pytest.approx(4096 / 0.084)
    cut = parts(figures)
    assert cut == pytest.approx(
        {"forward": 18, "reduce": 22, "update": 10 / 3, "bcast": 20, "waiting": 50 / 3, "other": 4}
    )
    assert sum(cut.values()) == pytest.approx(figures["step_ms"])


def test_means_if_only_some_steps_exchange(tmp_path):
    """A period of 4 steps: three of 10 ms, one of 50 ms. 600 tokens a step, and 60,000 tokens/s are 60% of the peak."""
    steps = [1000, 1000, 10, 10, 10, 50, 10, 10, 10, 50]
    log = [
        {"step": number, "step_s": ms / 1e3, "tokens_per_s": 6e5 / ms, "mfu": 6 / ms}
        for number, ms in enumerate(steps, start=1)
    ]
    path = write_run(tmp_path, [one_rank(*steps)], [0], log=log)
    assert summary(read_run(path))["step_ms"] == pytest.approx(10)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"exchange_period": 4}))
    figures = summary(read_run(path))
    assert figures["step_ms"] == pytest.approx(20)
    assert figures["phases_ms"] == pytest.approx({"forward": 20})
    assert figures["tokens_per_s"] == pytest.approx(30_000)
    assert figures["mfu"] == pytest.approx(0.3)
    assert figures["exchange_period"] == 4


def test_mfu_is_the_median_of_the_steps_that_are_measured(tmp_path):
    """6 MFLOP a token on a peak of 1 TFLOP/s: 50,000 tokens/s are 30%. The warm-up does not count."""
    rates = [1_000, 2_000, 90_000, 50_000, 30_000, 50_000]
    log = [{"step": n, "step_s": 1, "tokens_per_s": rate} for n, rate in enumerate(rates, start=1)]
    assert summary(read_run(write_run(tmp_path / "unknown", three_ranks(6), [0, 0, 1], log=log)))["mfu"] is None
    log = [row | {"mfu": row["tokens_per_s"] * 6e6 / 1e12} for row in log]
    figures = summary(read_run(write_run(tmp_path / "run", three_ranks(6), [0, 0, 1], log=log)))
    assert figures["mfu"] == pytest.approx(0.3)


def test_mfu_is_a_part_of_the_largest_peak_that_is_known(tmp_path):
    """6 MFLOP a token: the fastest step that counts, 50,000 tokens/s, reached 0.3 TFLOP/s, the median one 0.24."""
    rates = [1_000, 2_000, 30_000, 50_000, 40_000]
    before = [{"step": n, "step_s": 1, "tokens_per_s": rate, "mfu": rate * 6e-5} for n, rate in enumerate(rates, 1)]
    reached = [max(1.0, *(row["mfu"] for row in before[: n + 1])) for n in range(len(before))]
    flags = [{"peak_underestimated": True} if most > 1 else {} for most in reached]
    log = [row | {"mfu": row["mfu"] / most} | flag for row, most, flag in zip(before, reached, flags, strict=True)]
    figures = summary(read_run(write_run(tmp_path / "run", three_ranks(5), [0, 0, 1], log=log)))
    assert figures["mfu"] == pytest.approx(0.8)
    assert figures["peak_underestimated"]
    row = table([figures | {"exchanging_share": 0.1}]).splitlines()[1]
    assert row.endswith("  at most 80% (peak underestimated)")


def one_rank(*durations):
    """Steps of these milliseconds one after the other, each all forward."""
    ends = np.cumsum(durations)
    spans = []
    for step, (start, end) in enumerate(zip(ends - durations, ends, strict=True), start=1):
        spans += [(step, "forward", -1, start, end), (step, STEP, -1, start, end)]
    return spans


@pytest.mark.parametrize(
    ("durations", "dropped"), [([500, 300, 12, 10, 14, 90, 13], 2), ([500, 300, 10, 11, 12], 2), ([500, 10, 11, 12], 0)]
)
def test_the_warm_up_is_left_out_of_five_steps_or_more(durations, dropped, tmp_path):
    run = read_run(write_run(tmp_path, [one_rank(*durations)], [0]))
    times = measure(run)
    assert (times.dropped, times.steps.tolist()) == (dropped, list(range(1, len(durations) + 1))[dropped:])
    assert summary(run, times)["step_ms"] == pytest.approx(np.median(durations[dropped:]))
    assert measure(run, warm_up=0).steps.tolist() == list(range(1, len(durations) + 1))
    if len(durations) == 7:
        assert times.steps[times.representative()] == 7, "of 13 ms"


def test_figures_are_medians_of_the_ranks_means(tmp_path):
    """Steps of 10, 10 and 100 ms on rank 0, where forward takes all of it, and twice as long on rank 1."""
    log = [{"step": step, "step_s": 0.5, "tokens_per_s": 3000} for step in (1, 2, 3)]
    spans = [one_rank(10, 10, 100), one_rank(20, 20, 200)]
    figures = summary(read_run(write_run(tmp_path, spans, [0, 0], log=log)))
    assert figures["phases_ms"] == pytest.approx({"forward": 15})
    assert figures["step_ms"] == pytest.approx(15)
    assert (figures["tokens_per_s"], figures["tokens_per_step"]) == (3000, 1500)


def test_waiting_is_the_phase_and_the_part_of_the_exchanges():
    figures = {"phases_ms": {"allreduce": 10, "wait": 5}, "waiting_ms": {"allreduce": 4}, "other_ms": 1}
    assert parts(figures) == {"allreduce": 6, "waiting": 9, "other": 1}


def test_phases_may_add_up_to_more_than_the_step(tmp_path):
    """Where phases are long in different steps, the sum of their medians is more than the median of their sums."""
    spans = [
        (3, "reduce", 0, 20, 29), (3, STEP, -1, 20, 30),
        (4, "bcast", 0, 30, 39), (4, STEP, -1, 30, 40),
        (5, "reduce", 0, 40, 49), (5, "bcast", 0, 50, 59), (5, STEP, -1, 40, 60),
    ]  # fmt: skip
    figures = summary(read_run(write_run(tmp_path, [spans], [0])))
    assert figures["steps"] == 3
    assert figures["phases_ms"] == pytest.approx({"reduce": 9, "bcast": 9})
    assert figures["step_ms"] == pytest.approx(10)
    assert figures["other_ms"] == 0


def test_what_lies_between_steps_is_in_no_step(tmp_path):
    spans = three_ranks(2)
    spans[0].insert(len(spans[0]) // 2, (1, "eval", -1, 184, 199))
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


# --- ranking ---


def figures_of(label, step_ms, tokens=1000.0, exchanges=True, phases=()):
    return {
        "label": label,
        "exchanges": exchanges,
        "step_ms": step_ms,
        "phases_ms": dict.fromkeys(phases, step_ms),
        "waiting_ms": {},
        "other_ms": 0.0,
        "exchanging_share": 0.5,
        "tokens_per_s": tokens / step_ms * 1e3,
        "tokens_per_step": tokens,
        "mfu": None,
        "peak_underestimated": False,
    }


def test_the_verdict_names_the_fastest():
    slow, fast = figures_of("reduce-bcast", 73.8), figures_of("reduce-scatter", 41.0)
    text = "fastest: reduce-scatter, 41 ms a step (1.8 times faster than reduce-bcast)"
    assert verdict([slow, fast]) == verdict([fast, slow]) == text
    assert verdict([slow]) == "reduce-bcast: 74 ms a step"
    assert verdict([slow, fast, figures_of("none", 20.0, exchanges=False)]) == text, "it exchanges nothing"
    # The dedicated server's step is shorter, but has fewer tokens in it.
    runs = [figures_of("reduce-bcast", 90.0, tokens=800.0), figures_of("sliced", 100.0, tokens=1000.0)]
    assert verdict(runs) == "fastest: sliced, 10,000 tokens/s (12% faster than reduce-bcast)"
    assert verdict([figures_of("ring", 50.0), figures_of("tree", 50.4)]).startswith("no difference: ring and tree")


def test_who_exchanges(tmp_path):
    """Several ranks without an exchange train a model each; one rank has nobody to exchange with."""
    step = [(1, "forward", -1, 0, 10), (1, STEP, -1, 0, 10)]
    several, one = (read_run(write_run(tmp_path / str(n), [step] * n, [0] * n)) for n in (2, 1))
    assert not summary(several)["exchanges"]
    assert summary(one)["exchanges"]
    assert summary(read_run(write_run(tmp_path / "run", three_ranks(), [0, 0, 1])))["exchanges"]


def test_the_table_has_a_line_a_run_and_a_column_a_part():
    runs = [figures_of("ring", 50.0, phases=["forward"]), figures_of("tree", 5.0, phases=["backward"])]
    lines = table(runs).splitlines()
    assert [line.split() for line in lines] == [
        ["median", "ms", "forward", "backward", "step", "exchanging", "tokens/s"],
        ["ring", "50.0", "-", "50.0", "50%", "20,000"],
        ["tree", "-", "5.00", "5.00", "50%", "200,000"],
    ]
    known = [runs[0], *(runs[1] | {"mfu": mfu} for mfu in (0.0462, 0.458))]
    assert [line.split()[-1] for line in table(known).splitlines()] == ["MFU", "-", "4.6%", "46%"]


def test_numbers_in_sentences():
    assert [bytes_text(amount) for amount in (12, 3.4e5, 2.71e7, 1.2e9)] == ["12 bytes", "340 kB", "27.1 MB", "1.2 GB"]
    assert (bytes_text(999.7e6), bytes_text(99.6e6, 2)) == ("1000 MB", "100 MB"), "never 1e+02"
    seconds = {0.00042: "0.42 ms", 0.0123: "12 ms", 0.12: "120 ms", 0.95: "0.95 s", 31: "31 s"}
    assert {s: seconds_text(s) for s in seconds} == seconds
    assert [short_ms(ms) for ms in (0.42, 4.21, 42.1, 421.4)] == ["0.4", "4.2", "42", "421"]
    assert [short_ms(ms, 3) for ms in (0.42, 4.21, 42.1, 421.4)] == ["0.42", "4.21", "42.1", "421"]
    assert [ratio_text(ratio) for ratio in (1.8, 1.08)] == ["1.8 times faster", "8% faster"]
    assert [mfu_text(mfu) for mfu in (0.458, 0.0462, 1.0)] == ["46%", "4.6%", "100%"]
    assert mfu_text(0.97, peak_underestimated=True) == "at most 97% (peak underestimated)"
    assert [short_count(n) for n in (820, 1500, 124439808, 1.5e9)] == ["820", "1.5k", "124.4M", "1.5B"]
