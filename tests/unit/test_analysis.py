"""Seconds by step, rank and phase, waits, medians and the verdict, against hand-computed runs."""

import numpy as np
import pytest

from tests.support.make_run import MS, three_ranks, write_run
from traces import RunError, read_run
from traces.read.analysis import measure
from traces.read.waits import find_waits
from traces.record import files
from traces.record.phases import INDEX, NAMES, STEP
from traces.units import ratio_text, short_ms
from traces.verdict.ranking import verdict
from traces.verdict.summary import parts, summary, table

# --- waiting ---


def waits_ms(folder, spans, nodes):
    """Per rank, {(phase, order among the rank's records): ms waited} of the records that waited."""
    run = read_run(write_run(folder, spans, nodes))
    return [
        {(NAMES[record["phase"]], index): wait / MS for index, (record, wait) in enumerate(pairs) if wait}
        for pairs in (
            list(zip(trace.records, waits, strict=True))
            for trace, waits in zip(run.ranks, find_waits(run), strict=True)
        )
    ]


def test_reduce_and_bcast_with_a_straggler(tmp_path):
    # The root has computed after 10 ms and waits for rank 2 until 30; the others wait from 45 for its bcast at 60.
    assert waits_ms(tmp_path, three_ranks(), [0, 0, 1]) == [
        {("reduce", 1): 20.0},
        {("bcast", 2): 15.0},
        {("bcast", 2): 15.0},
    ]


def test_without_a_root_all_wait_for_the_last(tmp_path):
    spans = [[(1, "allreduce", -1, enter, leave)] for enter, leave in ((10, 50), (25, 50), (40, 52))]
    assert waits_ms(tmp_path, spans, [0, 0, 1]) == [{("allreduce", 0): 30.0}, {("allreduce", 0): 15.0}, {}]


def test_a_wait_is_no_longer_than_its_phase(tmp_path):
    # Rank 0 has left before the last rank entered: clocks differ, or the library let it go.
    spans = [[(1, "allreduce", -1, 10, 15)], [(1, "allreduce", -1, 40, 50)]]
    assert waits_ms(tmp_path, spans, [0, 0]) == [{("allreduce", 0): 5.0}, {}]


def test_calls_are_matched_by_order_and_root(tmp_path):
    # Sliced: two reduces to different roots, twice over (two micro-steps).
    first = [(1, "reduce", 0, 0, 10), (1, "reduce", 1, 10, 20), (1, "reduce", 0, 20, 30), (1, "reduce", 1, 30, 40)]
    second = [(1, "reduce", 0, 3, 8), (1, "reduce", 1, 8, 21), (1, "reduce", 0, 24, 29), (1, "reduce", 1, 29, 44)]
    assert waits_ms(tmp_path, [first, second], [0, 1]) == [
        {("reduce", 0): 3.0, ("reduce", 2): 4.0},
        {("reduce", 1): 2.0, ("reduce", 3): 1.0},
    ]


def test_ranks_that_skip_a_call_are_not_waited_for(tmp_path):
    # Hierarchical: a reduce inside each node, an allreduce among the leaders 0 and 2.
    spans = [
        [(1, "reduce", 0, 0, 10), (1, "allreduce", -1, 10, 30)],
        [(1, "reduce", 0, 4, 9)],
        [(1, "reduce", 2, 0, 15), (1, "allreduce", -1, 15, 30)],
        [(1, "reduce", 2, 7, 14)],
    ]
    assert waits_ms(tmp_path, spans, [0, 0, 1, 1]) == [
        {("reduce", 0): 4.0, ("allreduce", 1): 5.0},
        {},
        {("reduce", 0): 7.0},
        {},
    ]


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


def test_no_share_of_a_step_is_more_than_the_step(tmp_path):
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
    assert figures["exchange_share"] == pytest.approx(0.9)


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


def test_a_run_without_exchange_is_never_the_fastest():
    runs = [figures_of("none", 20.0, exchanges=False), figures_of("sliced", 50.0), figures_of("allreduce", 40.0)]
    assert verdict(runs) == "fastest: allreduce, 40 ms a step (1.2 times faster than sliced)"


def test_who_exchanges(tmp_path):
    """Several ranks without an exchange train a model each; one rank has nobody to exchange with."""
    step = [(1, "forward", -1, 0, 10), (1, STEP, -1, 0, 10)]
    several, one = (read_run(write_run(tmp_path / str(n), [step] * n, [0] * n)) for n in (2, 1))
    assert not summary(several)["exchanges"]
    assert summary(one)["exchanges"]
    assert summary(read_run(write_run(tmp_path / "run", three_ranks(), [0, 0, 1])))["exchanges"]


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
    runs = [figures_of("ring", 50.0, phases=["forward"]), figures_of("tree", 5.0, phases=["backward"])]
    lines = table(runs).splitlines()
    assert [line.split() for line in lines] == [
        ["median", "ms", "forward", "backward", "step", "exchanging", "tokens/s"],
        ["ring", "50.0", "-", "50.0", "50%", "20,000"],
        ["tree", "-", "5.00", "5.00", "50%", "200,000"],
    ]


def test_the_table_has_mfu_where_a_run_knows_it():
    runs = [figures_of("ring", 50.0), figures_of("tree", 5.0) | {"mfu": 0.0462}, figures_of("sliced", 5.0)]
    runs[2]["mfu"] = 0.458
    assert [line.split()[-1] for line in table(runs).splitlines()] == ["MFU", "-", "4.6%", "46%"]
