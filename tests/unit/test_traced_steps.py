"""Which steps a long run traces: the first, ever fewer, some that stood out, and no more than its files may take."""

from types import SimpleNamespace

import numpy as np
import pytest

from scripts.training.meeting import MeetingPoint
from tests.unit.test_traces import IDENTITY, trace_of
from traces.read.trace_files import read_counters
from traces.record.files import CounterFile, counters_path
from traces.record.phases import INDEX, STEP
from traces.record.recorder import Tracer
from traces.record.steps import REGULAR_EACH, SlowSteps, is_regular

CLOCK = {"offset_ns": 0, "error_ns": 0}


def traced(tmp_path, count, first=1, steps="on", kept=(), **options):
    """The steps that a run of so many writes, which is told to keep some."""
    tracer = Tracer(tmp_path, IDENTITY, steps, **options)
    for number in range(first, first + count):
        with tracer.step(number):
            with tracer.phase("forward"):
                pass
            if number in kept:
                tracer.keep_step()
    tracer.close()
    found = trace_of(tmp_path).records
    assert (np.unique(found["step"], return_counts=True)[1] == 2).all(), "the phase and the step, or neither"
    return np.unique(found["step"]).tolist()


def test_a_long_run_writes_ever_fewer_steps(tmp_path):
    expected = [*range(1, 257), *range(264, 2049, 8), 2112, 2176]
    assert traced(tmp_path, 2200) == expected
    assert traced(tmp_path, 2200, first=5001) == [5000 + step for step in expected], "a start has its own first step"
    assert traced(tmp_path, 400, steps="2:380") == list(range(2, 381)), "who names steps gets all of them"


def test_a_week_is_bounded():
    assert sum(map(is_regular, range(1, 10**6 + 1))) == 256 + 3 * 224 + (10**6 - 131072) // 4096


def test_a_step_that_is_kept_for_its_length(tmp_path):
    assert traced(tmp_path, 300, kept=(258, 270)) == [*range(1, 257), 258, 264, 270, 272, 280, 288, 296]


def test_of_a_long_step_that_is_left_out_nothing_is_written(tmp_path, monkeypatch):
    """Its first phases would be, a second after the last writing."""
    monkeypatch.setattr("traces.record.recorder.WRITE_AT_PHASE_END_NS", 0)
    assert traced(tmp_path, 280) == [*range(1, 257), 264, 272, 280]


def test_the_step_that_ends_a_run_is_written(tmp_path):
    tracer = Tracer(tmp_path, IDENTITY)
    for number in range(1, 300):
        with tracer.step(number):
            pass
    with pytest.raises(KeyboardInterrupt), tracer.step(300), tracer.phase("forward"):
        raise KeyboardInterrupt
    tracer.close()
    assert trace_of(tmp_path).records["step"][-2:].tolist() == [300, 300]


def test_counters_of_steps_that_are_left_out(tmp_path):
    """A step begins and ends with a reading, so that none of the bytes of those that were left out count as its own."""
    readings = iter(range(10**6))
    counters = CounterFile(tmp_path, IDENTITY, ["eth0"], CLOCK, lambda: (next(readings), 0, 0))
    tracer = Tracer(tmp_path, IDENTITY, counters=counters)
    for number in range(1, 281):
        with tracer.step(number), tracer.phase("reduce"):
            counters._sampled_at = 0  # as long a phase as it takes for a reading
    tracer.close()
    records, times = trace_of(tmp_path).records, read_counters(counters_path(tmp_path, 0), {}).records["time"]
    steps = records[records["phase"] == INDEX[STEP]]
    before, inside, after = times.reshape(256 + 3, 3).T
    assert (before <= steps["start"]).all()
    assert (before[1:] >= steps["end"][:-1]).all()
    assert ((inside >= steps["start"]) & (inside <= steps["end"])).all()
    assert (after >= steps["end"]).all()


def test_files_end_where_they_are_as_large_as_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("traces.record.recorder.WRITE_AT_STEP_END_NS", 0)
    steps = traced(tmp_path, 200, most_bytes=50 * 2 * 36)
    assert steps == list(range(1, 51)), "two records a step: the step and the phase"
    tracer = Tracer(tmp_path, IDENTITY, most_bytes=100)
    assert not tracer.is_full
    for number in (1, 2, 3):
        with tracer.step(number), tracer.phase("forward"):
            pass
    assert tracer.is_full
    tracer.close()
    assert trace_of(tmp_path).records["step"].tolist() == [1, 1, 2, 2]


def kept_of(seconds):
    slow = SlowSteps()
    return [number for number, one in enumerate(seconds, start=1) if slow.is_kept(one)]


def test_steps_that_stand_out_from_those_before_them():
    seconds = np.ones(1000)
    seconds[[20, 257, 299, 499, 500]] = [9.0, 2.0, 1.4, 1.6, 1.6]
    assert kept_of(seconds) == [258, 500, 501], "21 is traced anyway; 300 is as slow as steps may be"
    assert kept_of(np.where(np.arange(1000) < 500, 1.0, 3.0))[0] == 501
    assert len(kept_of(np.where(np.arange(1000) < 500, 1.0, 3.0))) <= 17, "then that is what is usual"


def test_slow_steps_are_few_among_the_regular_ones():
    seconds = np.where(np.arange(20_000) % 3, 1.0, 9.0)
    regular = sum(map(is_regular, range(1, 20_001)))
    kept = kept_of(seconds)
    assert regular / REGULAR_EACH - 1 <= len(kept) <= regular / REGULAR_EACH
    assert not any(map(is_regular, kept))


def test_all_ranks_keep_what_the_slowest_took_long_for(monkeypatch):
    """What a rank knows of another's step comes with the meeting, so all decide alike."""
    longest = iter([1.0] * 299 + [2.0, 1.0])

    def gathered(comm, *own):
        return np.array([[0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, next(longest), 0, 0, 0, 0, 0, 0]])

    monkeypatch.setattr("scripts.training.meeting.gather_everywhere", gathered)
    met, kept = [], []
    nothing = SimpleNamespace(requested=lambda: 0, written=lambda: 0, own=lambda: 0, settle=id, tell=id)
    worker = SimpleNamespace(seconds=lambda: (0, 1, 1, 0))
    point = MeetingPoint(
        None, worker, [nothing], nothing, nothing, SimpleNamespace(keep_step=lambda: kept.append(len(met) + 1))
    )
    while len(met) < 301:
        met.append(point.meet(0.0, None))
    assert kept == [300]
