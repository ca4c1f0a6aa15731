"""traces/: what the tracer writes against what was timed."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.make_run import IDENTITY, MS, three_ranks, write_run
from traces import RunError, Tracer
from traces.export.paraver import STATE_OF
from traces.plots.look import COLOUR
from traces.read.trace_files import read_trace
from traces.record import files, recorder
from traces.record.phases import EXCHANGE, NAMES, PHASES, STEP


def trace_of(folder):
    return read_trace(files.trace_path(folder, 0))


# --- Tracer ---


def test_tracer_writes_what_it_timed(tmp_path):
    tracer = Tracer(tmp_path, IDENTITY, clock={"offset_ns": 0, "error_ns": 7})
    with tracer.step(1):
        with tracer.phase("forward"):
            time.sleep(0.01)
        with tracer.phase("reduce", bytes=4096, root=0):
            pass
    with tracer.phase("eval"):
        pass
    tracer.close()
    trace = trace_of(tmp_path)
    assert trace.identity == IDENTITY
    assert trace.clock == {"offset_ns": 0, "error_ns": 7}
    records = trace.records
    assert [NAMES[index] for index in records["phase"]] == ["forward", "reduce", "step", "eval"]
    assert records["root"].tolist() == [-1, 0, -1, -1]
    assert records["bytes"].tolist() == [0, 4096, 0, 0]
    # The phase between steps carries the number of the step before it.
    assert records["step"].tolist() == [1, 1, 1, 1]
    forward, reduce_, step, evaluation = records
    assert step["start"] <= forward["start"] < forward["end"] <= reduce_["start"] <= reduce_["end"] <= step["end"]
    assert step["end"] <= evaluation["start"]
    assert (forward["end"] - forward["start"]) * 1e-9 == tracer.seconds("forward") >= 0.01
    assert (step["end"] - step["start"]) * 1e-9 == tracer.seconds(STEP)


def test_whoever_watches_hears_when_a_phase_begins_and_ends():
    heard = []
    tracer = Tracer(on_phase=lambda *what: heard.append(what))
    with tracer.step(7):
        for name in ("forward", "allreduce"):
            with tracer.phase(name):
                assert heard[-1] == (name, 7)
    assert heard == [("forward", 7), (None, 7), ("allreduce", 7), (None, 7)]


def test_seconds_are_the_steps_own_and_need_no_file():
    tracer = Tracer()
    with tracer.step(1):
        for _ in range(2):
            with tracer.phase("allreduce"):
                time.sleep(0.002)
        with tracer.phase("bcast"):
            time.sleep(0.001)
        during = tracer.seconds("allreduce")
    with tracer.phase("allreduce"):
        time.sleep(0.001)
    assert tracer.seconds("allreduce") == during >= 0.004
    assert tracer.seconds(*EXCHANGE) == pytest.approx(tracer.seconds("allreduce") + tracer.seconds("bcast"))
    assert tracer.seconds(*EXCHANGE) >= 0.005
    with tracer.step(2):
        pass
    assert tracer.seconds(*EXCHANGE) == 0


@pytest.mark.parametrize(("steps", "written"), [("on", [0, 1, 2, 3, 4]), ("2:3", [2, 3]), ("4:9", [4]), ("off", [])])
def test_only_the_asked_steps_are_written(tmp_path, steps, written):
    tracer = Tracer(tmp_path, IDENTITY, steps=steps)
    with tracer.phase("bcast"):
        pass
    for number in (1, 2, 3, 4):
        with tracer.step(number), tracer.phase("forward"):
            time.sleep(0.001)
        assert tracer.seconds("forward") >= 0.001
    tracer.close()
    if steps == "off":
        assert not list(tmp_path.iterdir())
    else:
        assert np.unique(trace_of(tmp_path).records["step"]).tolist() == written


@pytest.mark.parametrize("steps", ["yes", "3", "5:4", "0:4", "a:b", "-1:3", ":", "1:2:3"])
def test_malformed_steps_say_what_is_expected(steps):
    with pytest.raises(RunError, match="expected on, off or FROM:TO"):
        Tracer(steps=steps)


@pytest.mark.parametrize("name", ["gather", "step"])
def test_a_name_that_is_no_phase_lists_the_phases(name):
    with pytest.raises(ValueError, match=f"'{name}'.*reduce_scatter.*checkpoint"):
        Tracer().phase(name)


def test_an_exception_passes_and_closes_its_spans(tmp_path):
    tracer = Tracer(tmp_path, IDENTITY)
    with pytest.raises(KeyError), tracer.step(1), tracer.phase("forward"):
        raise KeyError
    with tracer.step(2), tracer.phase("forward"):
        pass
    tracer.close()
    assert trace_of(tmp_path).records["step"].tolist() == [1, 1, 2, 2]


def test_phases_and_steps_do_not_nest():
    tracer = Tracer()
    with tracer.step(1), tracer.phase("forward"), pytest.raises(RuntimeError, match="count twice"):
        tracer.phase("data").__enter__()
    with tracer.step(2), pytest.raises(RuntimeError, match="step 3"):
        tracer.step(3).__enter__()


def test_an_interruption_ends_the_phase_and_begins_it_again(tmp_path):
    tracer = Tracer(tmp_path, IDENTITY)
    with tracer.step(1):
        with tracer.phase("forward"):
            with tracer.interruption("allgather", bytes=8):
                pass
            with pytest.raises(KeyError), tracer.interruption("allgather", bytes=9):
                raise KeyError
        with tracer.interruption("update"):
            pass
    tracer.close()
    records = trace_of(tmp_path).records[:-1]
    assert [NAMES[phase] for phase in records["phase"]] == [*["forward", "allgather"] * 2, "forward", "update"]
    assert records["bytes"].tolist() == [0, 8, 0, 9, 0, 0]
    assert (records["end"][:-1] <= records["start"][1:]).all()


def test_records_are_in_the_file_a_second_after_the_last_writing(tmp_path, monkeypatch):
    now = [0]
    monkeypatch.setattr(recorder, "perf_counter_ns", lambda: now[0])
    tracer = Tracer(tmp_path, IDENTITY)

    def advance(ms):
        now[0] += ms * MS

    with tracer.step(1), tracer.phase("forward"):
        advance(400)
    assert len(trace_of(tmp_path).records) == 0
    # Half a second has passed at this step's end: better written here than inside the next step.
    with tracer.step(2), tracer.phase("forward"):
        advance(101)
    assert len(trace_of(tmp_path).records) == 4
    with tracer.step(3):
        with tracer.phase("forward"):
            advance(999)
        assert len(trace_of(tmp_path).records) == 4
        with tracer.phase("backward"):
            advance(1)
        assert len(trace_of(tmp_path).records) == 6


def test_a_killed_process_leaves_a_readable_trace(tmp_path):
    script = f"""
import os
from traces import Tracer
from traces.record import recorder
recorder.WRITE_AT_STEP_END_NS = 0
tracer = Tracer({str(tmp_path)!r}, {IDENTITY!r})
for number in (1, 2):
    with tracer.step(number), tracer.phase("forward"):
        pass
with tracer.step(3):
    with tracer.phase("forward"):
        os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    assert trace_of(tmp_path).records["step"].tolist() == [1, 1, 2, 2]


def test_a_smaller_run_in_the_same_folder_replaces_the_larger(tmp_path):
    write_run(tmp_path, three_ranks(), [0, 0, 1])
    Tracer(tmp_path / "traces", IDENTITY).close()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["rank-00000.trace"]
    assert trace_of(tmp_path / "traces").identity["ranks"] == 1


def test_a_phase_costs_little_beside_a_small_product():
    tracer, matrix, turns = Tracer(), np.ones((200, 200), np.float32), 100

    def seconds(body):
        begin = time.perf_counter()
        for _ in range(turns):
            body()
        return time.perf_counter() - begin

    def timed():
        with tracer.phase("forward"):
            pass

    assert min(seconds(timed) for _ in range(5)) < min(seconds(lambda: matrix @ matrix) for _ in range(5))


def test_traces_stands_alone():
    """Training imports it on every rank: neither matplotlib nor the other packages may come along."""
    script = "import sys, traces; print([n for n in ('matplotlib', 'mpi4py', 'gpt2', 'dist') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name", PHASES)
def test_a_phase_is_known_everywhere(name):
    formats = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    rows = formats.partition("| phase | what it covers |\n")[2].partition("\n\n")[0].splitlines()
    assert name in COLOUR, "give it a colour in GROUPS of traces/plots/look.py"
    assert name in STATE_OF, "give it a state in STATE_OF of traces/export/paraver.py"
    is_explained = any(f"`{name}`" in row.split("|")[1] for row in rows)
    assert is_explained, "say what it covers in the table of phases in docs/formats.md"
