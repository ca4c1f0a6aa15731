"""The figures of a run's summary: which steps and ranks they are of, and the texts that show them."""

import numpy as np
import pytest

from tests.support.make_run import write_run
from traces import read_run
from traces.read.analysis import measure
from traces.record.phases import STEP
from traces.units import mfu_text, short_count
from traces.verdict.summary import parts, summary


def one_rank(*durations):
    """Steps of these milliseconds one after the other, each all forward."""
    ends = np.cumsum(durations)
    spans = []
    for step, (start, end) in enumerate(zip(ends - durations, ends, strict=True), start=1):
        spans += [(step, "forward", -1, start, end), (step, STEP, -1, start, end)]
    return spans


def test_five_steps_are_enough_to_leave_the_warm_up_out(tmp_path):
    times = measure(read_run(write_run(tmp_path, [one_rank(500, 300, 10, 11, 12)], [0])))
    assert (times.dropped, times.steps.tolist()) == (2, [3, 4, 5])


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


def test_short_texts():
    assert [mfu_text(mfu) for mfu in (0.458, 0.0462, 1.0)] == ["46%", "4.6%", "100%"]
    assert mfu_text(0.97, peak_underestimated=True) == "at most 97% (peak underestimated)"
    assert [short_count(n) for n in (820, 1500, 124439808, 1.5e9)] == ["820", "1.5k", "124.4M", "1.5B"]
