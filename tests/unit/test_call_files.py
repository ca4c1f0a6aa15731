"""rank-00000.calls: what the tracer writes of calls that go on beside others, and what is read of it."""

import json
import time

import numpy as np
import pytest

from tests.support.fake_stream import FakeDevice
from tests.support.make_run import IDENTITY, MS, three_ranks, write_calls, write_run
from traces import Tracer, read_run
from traces.read.trace_files import read_calls
from traces.record.files import calls_path, trace_path
from traces.record.phases import INDEX


def calls_in(folder):
    return read_calls(calls_path(folder, 0), {})[1]


def test_calls_overlap_each_other_and_phases_and_steps(tmp_path):
    tracer = Tracer(tmp_path, IDENTITY, clock={"offset_ns": 5 * MS, "error_ns": 7})
    with tracer.step(1), tracer.phase("reduce"):
        before = time.perf_counter_ns()
        first = tracer.call("reduce", 100, 0)
        time.sleep(0.002)
        second = tracer.call("reduce", 200, 0)
        second.ended()
        time.sleep(0.002)
        between = time.perf_counter_ns()
    with tracer.step(2), tracer.phase("forward"), tracer.call("bcast", 300, 0):
        first.ended()
    after = time.perf_counter_ns()
    tracer.close()
    calls = calls_in(tmp_path)
    assert calls["phase"].tolist() == [INDEX["reduce"], INDEX["reduce"], INDEX["bcast"]], "in the order of their ends"
    assert calls["bytes"].tolist() == [200, 100, 300]
    assert calls["step"].tolist() == [1, 1, 2], "the step in which it began"
    start, end = calls["start"] - 5 * MS, calls["end"] - 5 * MS
    assert before <= start[1] <= start[0] - 2 * MS
    assert start[0] <= end[0] <= between - 2 * MS
    assert between <= end[1] <= end[2] <= after
    assert tracer.seconds("reduce") == 0, "a call is in no phase's seconds"


def test_who_notes_no_call_has_no_file_and_an_earlier_runs_goes(tmp_path):
    tracer = Tracer(tmp_path, IDENTITY)
    with tracer.step(1):
        tracer.call("bcast", 1, 0).ended()
    tracer.close()
    calls_path(tmp_path, 1).write_bytes(b"of a rank that is not there any more")
    tracer = Tracer(tmp_path, IDENTITY)
    with tracer.step(1), tracer.phase("forward"):
        pass
    tracer.close()
    assert [path.name for path in tmp_path.iterdir()] == [trace_path(tmp_path, 0).name]


@pytest.mark.parametrize("options", [{"steps": "2:3"}, {"steps": "off"}, {"device": FakeDevice()}])
def test_nothing_is_written_outside_the_traced_steps_and_beside_a_gpu(tmp_path, options):
    tracer = Tracer(tmp_path, IDENTITY, **options)
    with tracer.step(1), tracer.call("reduce", 1, 0):
        pass
    tracer.close()
    assert not calls_path(tmp_path, 0).exists()


def test_a_run_has_the_calls_of_its_ranks_on_rank_0s_clock(tmp_path):
    run = write_run(tmp_path / "run", three_ranks(), [0, 0, 1], offsets_ns=[0, 0, 3 * MS])
    calls = [(1, "reduce", 2, 30, 50, 700), (1, "bcast", 0, 45, 80, 900)]
    write_calls(run, 2, calls, offset_ns=3 * MS)
    found = read_run(run)
    assert [len(trace.calls) for trace in found.ranks] == [0, 0, 2]
    assert found.ranks[2].calls["start"].tolist() == [30 * MS, 45 * MS]
    assert found.ranks[2].calls["end"].tolist() == [50 * MS, 80 * MS]
    assert found.ranks[2].calls["root"].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([(1, "reduce", 3, 30, 50, 7)], "a step, root or size is impossible"),
        ([(1, "reduce", -1, 30, 50, 7)], "a call has no root"),
        ([(1, "reduce", 0, 30, 50, -7)], "a step, root or size is impossible"),
        ([(1, "reduce", 0, 50, 30, 7)], "a span ends before it begins"),
        ([(1, "reduce", 0, 30, 50, 7), (1, "reduce", 0, 30, 40, 7)], "a call was written before an earlier one"),
    ],
)
def test_calls_that_cannot_be_are_left_out_with_a_line(tmp_path, calls, why):
    run = write_run(tmp_path / "run", three_ranks(), [0, 0, 1])
    path = write_calls(run, 1, calls)
    found = read_run(run)
    assert not any(len(trace.calls) for trace in found.ranks)
    assert [line for line in found.missing if f"{path} is damaged and left out: {why}" in line]


def test_another_ranks_file_or_another_format_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", three_ranks(), [0, 0, 1])
    path = write_calls(run, 1, [(1, "reduce", 0, 30, 50, 7)])
    calls_path(run / "traces", 0).write_bytes(path.read_bytes())
    header, _, records = path.read_bytes().partition(b"\n")
    for name, value in (("version", 2), ("phases", [["reduce"]]), ("fields", []), ("identity", None), ("clock", 1)):
        path.write_bytes(json.dumps(json.loads(header) | {name: value}).encode() + b"\n" + records)
        found = read_run(run)
        assert len(found.missing) == 2, name
        assert not np.concatenate([trace.calls for trace in found.ranks]).size
