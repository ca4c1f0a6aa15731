"""Network counters, clocks that drift, and runs of which a part is missing."""

import json
from time import perf_counter_ns

import numpy as np
import pytest

from tests.support.make_run import IDENTITY, MS, three_ranks, write_run
from traces import RunError, Tracer, read_run
from traces.read.run_files import Gaps, read_measured_at_end
from traces.read.trace_files import read_counters, read_trace, to_rank_0
from traces.record.files import COUNTERS, END_CLOCKS, SAMPLE_NS, CounterFile, counters_path, trace_path, write_at_end
from traces.record.phases import INDEX, STEP
from traces.record.recorder import tracing_share

NODES = [0, 0, 1]


def test_the_tracer_samples_where_phases_end(tmp_path):
    """Not more often than SAMPLE_NS, on rank 0's clock, at both ends of a step, and only in steps that are traced."""
    values = iter(zip(range(0, 1000, 10), range(0, 2000, 20), range(100), strict=True))
    counters = CounterFile(tmp_path, IDENTITY, ["eth0"], {"offset_ns": 7, "error_ns": 1}, lambda: next(values))
    tracer = Tracer(tmp_path, IDENTITY, "2:2", counters=counters)
    for step in (1, 2, 3):
        with tracer.step(step):
            for _ in range(2):
                with tracer.phase("reduce"):
                    wait_ns(2 * SAMPLE_NS)
                with tracer.phase("update"):
                    pass
    tracer.close()
    counted = read_counters(counters_path(tmp_path, 0), {})
    assert (counted.node, counted.host, counted.ports) == (0, "a", ["eth0"])
    assert counted.records["in"].tolist() == [0, 10, 20, 30]
    assert counted.records["out"].tolist() == [0, 20, 40, 60]
    assert counted.records["stalled"].tolist() == [0, 1, 2, 3]
    (step,), reduces = read_run_records(tmp_path, STEP), read_run_records(tmp_path, "reduce")
    first, *inside, last = counted.records["time"] - 7
    assert first <= step["start"]
    assert step["end"] <= last
    after = inside - reduces["end"]
    assert (after >= 0).all()
    assert (after < SAMPLE_NS).all()


def wait_ns(nanoseconds):
    start = perf_counter_ns()
    while perf_counter_ns() - start < nanoseconds:
        pass


def read_run_records(folder, phase):
    records = read_trace(trace_path(folder, 0)).records
    return records[records["phase"] == INDEX[phase]]


def test_counters_are_read_every_five_milliseconds(tmp_path):
    """A reading takes up to 20 us: more often would cost more than half a percent of the time. A sample that a crash
    cuts short is dropped."""
    counters = CounterFile(tmp_path, IDENTITY, [], {"offset_ns": 0, "error_ns": 0}, lambda: (0, 0, 0))
    counters.begin()
    for ms in (1000, 1004.9, 1005.1, 1010, 1010.2):
        counters.sample(round(ms * MS))
    counters.write()
    counters.close()
    path = counters_path(tmp_path, 0)
    assert len(read_counters(path, {}).records) == 3
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_counters(path, {}).records) == 2


def test_a_new_run_forgets_the_end_clocks_of_an_earlier_one(tmp_path):
    """They are of other moments: with them all times of the new run would be bent."""
    write_at_end(tmp_path, END_CLOCKS, [{"node": 0, "offset_ns": 10**9, "error_ns": 9, "at_ns": 10**12}])
    Tracer(tmp_path, IDENTITY).close()
    assert read_measured_at_end(tmp_path, END_CLOCKS, Gaps(allowed=False)) == {}


def test_drifting_clocks_are_interpolated():
    """Two clocks, one 40 ppm fast: without the second measurement 10 minutes are 24 ms off."""
    minutes = 600 * 10**9
    true = np.linspace(0, minutes, 7).astype(np.int64)
    own = 5_000_000 + np.rint(true * (1 + 40e-6)).astype(np.int64)
    start = {"offset_ns": -5_000_000, "error_ns": 10, "at_ns": 5_000_000}
    end = {"offset_ns": int(minutes - own[-1]), "error_ns": 20, "at_ns": int(own[-1])}
    assert np.abs(to_rank_0(own, start, end) - true).max() <= 1
    assert abs(to_rank_0(own, start, None)[-1] - true[-1]) == pytest.approx(24e6, rel=1e-3)


def test_a_time_between_two_clocks_is_the_nearest_nanosecond():
    start, end = {"offset_ns": 0, "error_ns": 0, "at_ns": 0}, {"offset_ns": 9, "error_ns": 0, "at_ns": 100}
    assert to_rank_0(np.array([0, 5, 6, 50, 100, -6]), start, end).tolist() == [0, 5, 7, 54, 109, -7]


@pytest.mark.parametrize(("offset_ns", "at_ns"), [(-2000, 2000), (500, 2000), (0, 500)])
def test_clocks_that_are_not_one_nodes(offset_ns, at_ns):
    """Backwards, far too fast, or the end before the start."""
    with pytest.raises(ValueError, match="not the same node's"):
        to_rank_0(
            np.arange(9), {"offset_ns": 0, "error_ns": 0, "at_ns": 1000}, {"offset_ns": offset_ns, "at_ns": at_ns}
        )


def test_a_run_is_read_with_its_end_clocks_and_counters(tmp_path):
    run = write_run(tmp_path, three_ranks(), NODES)
    header = {"format": "gpt2-mpi counters", "version": 1, "node": 1, "host": "cn01", "ports": ["ib0"]}
    header["clock"] = {"offset_ns": 0, "error_ns": 5, "at_ns": 0}
    samples = np.array([(MS, 1, 2, 0), (11 * MS, 5, 6, 0)], COUNTERS)
    counters_path(run / "traces", 1).write_bytes(json.dumps(header).encode() + b"\n" + samples.tobytes())
    counters_path(run / "traces", 0).write_text("not counters")
    write_at_end(run / "traces", END_CLOCKS, [{"node": 1, "offset_ns": 1000, "error_ns": 9, "at_ns": 10 * MS}])
    read = read_run(run)
    (counted,) = read.counters
    assert "node-00000.counters is damaged and left out" in str(read.missing)
    assert counted.records["time"].tolist() == [MS + 100, 11 * MS + 1100]
    assert [trace.clock["error_ns"] for trace in read.ranks] == [0, 0, 9]


def test_what_is_missing_is_said_and_the_rest_is_read(tmp_path):
    run = write_run(tmp_path, three_ranks(5), NODES)
    trace_path(run / "traces", 1).unlink()
    trace_path(run / "traces", 2).write_text("{}\n")
    (run / "config.json").unlink()
    with (run / "log.jsonl").open("a") as log:
        log.write("garbage\n")
    with pytest.raises(RunError, match=r"config\.json is missing"):
        read_run(run)
    read = read_run(run, allow_missing=True)
    assert [trace.identity["rank"] for trace in read.ranks] == [0]
    assert read.strategy == "reduce-bcast"
    assert len(read.log) == 5
    for lacking in ("config.json", "log.jsonl, line 6", "not a trace file", "rank-00001"):
        assert lacking in str(read.missing)
    (run / "log.jsonl").unlink()
    assert read_run(run, allow_missing=True).log == []
    trace_path(run / "traces", 0).write_text("{}\n")
    with pytest.raises(RunError, match="not a trace file"):
        read_run(run, allow_missing=True)


def test_what_tracing_costs_is_counted(tmp_path):
    """Spans written, the time of their steps, and the counters' readings; nothing of steps that are not traced."""

    spent_ns = []

    def slow_reading():
        begun = perf_counter_ns()
        wait_ns(SAMPLE_NS)
        spent_ns.append(perf_counter_ns() - begun)
        return 0, 0, 0

    counters = CounterFile(tmp_path, IDENTITY, [], {"offset_ns": 0, "error_ns": 0}, slow_reading)
    tracer = Tracer(tmp_path, IDENTITY, "2:2", counters=counters)
    assert tracing_share(tracer) == 0
    for step in (1, 2):
        with tracer.step(step), tracer.phase("reduce"):
            wait_ns(2 * SAMPLE_NS)
    tracer.close()
    assert tracer.traced_ns == round(tracer.seconds("step") * 1e9) >= 3 * SAMPLE_NS
    assert len(spent_ns) == 3, "at both ends of the step, and at the phase's"
    reading = tracer.counters_ns / tracer.traced_ns
    assert sum(spent_ns) / tracer.traced_ns <= reading < tracing_share(tracer) < reading + 0.1
