"""What is written beside training and cannot be: traces, counters, clocks.

Training goes on, and what was written before stays readable. A full disk is a limit for the size of files here, which
cuts the write that reaches it.
"""

import resource
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.errors import UserError
from scripts.training.folder import RunFolder
from scripts.training.report import TraceFailures, keep_at_end
from tests.support.make_run import IDENTITY
from traces import Tracer
from traces.read.run_files import Gaps, read_measured_at_end
from traces.read.trace_files import read_counters, read_trace
from traces.record.files import END_CLOCKS, END_LINKS, RECORD, CounterFile, counters_path, trace_path, write_at_end
from traces.record.recorder import tracing_share

ONE_CLOCK = {"offset_ns": 0, "error_ns": 0}
PLACES = [{"rank": rank, "host": f"cn{rank}"} for rank in range(6)]


@contextmanager
def files_of_at_most(size: int):
    """No file grows beyond so many bytes while the block runs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make_steps(tracer: Tracer, steps: range) -> None:
    for step in steps:
        with tracer.step(step), tracer.phase("forward"):
            pass


@pytest.fixture
def eager(monkeypatch):
    """Every step is written at its end."""
    monkeypatch.setattr("traces.record.recorder.WRITE_AT_STEP_END_NS", 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("room", [0, 1, RECORD.itemsize - 1, RECORD.itemsize, 5 * RECORD.itemsize + 7])
def test_a_full_disk_ends_the_tracing_and_no_more(tmp_path, room):
    tracer = Tracer(tmp_path, IDENTITY)
    path = trace_path(tmp_path, 0)
    header = path.stat().st_size
    with files_of_at_most(header + room):
        make_steps(tracer, range(1, 10))
    assert "File too large" in str(tracer.failure)
    assert path.stat().st_size == header + room
    make_steps(tracer, range(10, 12))  # there is room again: a record behind a half one would make nonsense of all
    tracer.close()
    assert tracer.seconds("forward") > 0
    assert tracing_share(tracer) >= 0
    assert path.stat().st_size == header + room
    records = read_trace(path).records
    assert len(records) == room // RECORD.itemsize
    assert records["step"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4][: len(records)]


@pytest.mark.usefixtures("eager")
def test_counters_that_cannot_be_written(tmp_path):
    counters = CounterFile(tmp_path, IDENTITY, [], ONE_CLOCK, lambda: (1, 2, 3))
    tracer = Tracer(tmp_path, IDENTITY, counters=counters)
    header = counters_path(tmp_path, 0).stat().st_size
    counters._file.close()
    counters._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    make_steps(tracer, range(1, 4))
    tracer.close()
    assert "No space left" in str(tracer.failure)
    assert read_trace(trace_path(tmp_path, 0)).records["step"].tolist() == [1, 1]
    assert counters_path(tmp_path, 0).stat().st_size == header
    assert len(read_counters(counters_path(tmp_path, 0), {}).records) == 0


@pytest.mark.parametrize("obstacle", ["folder is a file", "trace is a folder", "counters are a folder", "no room"])
def test_files_that_cannot_be_made(tmp_path, obstacle):
    folder, size = tmp_path / "traces", resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if obstacle == "folder is a file":
        folder.touch()
    elif obstacle == "trace is a folder":
        trace_path(folder, 0).mkdir(parents=True)
    elif obstacle == "counters are a folder":
        counters_path(folder, 0).mkdir(parents=True)
    else:
        size = 10
    counters = CounterFile(folder, IDENTITY, [], ONE_CLOCK, lambda: (1, 2, 3))
    with files_of_at_most(size):
        tracer = Tracer(folder, IDENTITY, counters=counters)
        make_steps(tracer, range(1, 3))
        tracer.close()
    assert isinstance(tracer.failure, OSError)
    assert tracer.seconds("forward") > 0
    assert not [path for path in folder.glob("*") if path.is_file() and path.stat().st_size <= 10]


def test_what_is_written_last_is_missed_at_the_end(tmp_path):
    tracer = Tracer(tmp_path, IDENTITY)
    make_steps(tracer, range(1, 3))
    with files_of_at_most(trace_path(tmp_path, 0).stat().st_size):
        tracer.close()
    assert isinstance(tracer.failure, OSError)
    assert len(read_trace(trace_path(tmp_path, 0)).records) == 0


def test_clocks_that_cannot_be_written(tmp_path, capsys):
    clocks = [{"node": node, "offset_ns": 1, "error_ns": 1, "at_ns": 1} for node in range(100)]
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        write_at_end(tmp_path, END_CLOCKS, clocks)
    assert read_measured_at_end(tmp_path, END_CLOCKS, Gaps(allowed=False)) == {}
    (tmp_path / "clocks.json").mkdir()
    keep_at_end(tmp_path, {END_CLOCKS: clocks, END_LINKS: []})
    assert capsys.readouterr().err == (
        f"warning: {tmp_path / 'clocks.json'}: Is a directory: the traces keep the clocks of the start alone\n"
    )


def test_two_lines_for_all_that_fail(tmp_path, capsys):
    """On a full disk a thousand ranks fail within a second, and not in the same step."""
    tracer = Tracer()
    failures = TraceFailures(SimpleNamespace(rank=0, places=PLACES), tmp_path, tracer)
    assert failures.own() == 0
    tracer.failure = OSError(28, "No space left on device")
    assert failures.own() == 28
    failures.tell(np.zeros(6))
    assert capsys.readouterr().err == ""
    for found in ([0, 28, 28, 0, 122, 0], [0, 28, 28, 0, 122, 0], [30, 28, 28, 0, 122, 0]):
        failures.tell(np.array(found, float))
    reason = f"warning: {tmp_path}: No space left on device: tracing is off from here on for rank 1 on cn1"
    assert capsys.readouterr().err == f"{reason} and 2 more; training goes on\n"
    failures.tell([30, 28, 28, 0, 122, 30], at_end=True)
    reason = f"warning: {tmp_path}: Read-only file system: the traces of rank 0 on cn0 and 1 more end early\n"
    assert capsys.readouterr().err == reason
    TraceFailures(SimpleNamespace(rank=1, places=PLACES), tmp_path, tracer).tell(None, at_end=True)
    assert capsys.readouterr().err == ""


def test_a_folder_of_checkpoints_that_is_protected_is_refused_at_the_start(tmp_path, monkeypatch):
    """os.access stands in for the system: it allows root everything."""
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "checkpoints")
    with pytest.raises(UserError, match="checkpoints: Permission denied: choose another --out"):
        RunFolder(tmp_path, lambda: None, 2)


def test_starts_from_the_same_step_keep_each_other_s_traces(tmp_path):
    (tmp_path / "run").mkdir()
    for start in range(4):
        folder = RunFolder(tmp_path / "run", lambda: None, 7 if start else None)
        folder.set_config({}, [], "", {})
        folder.begin()
        (tmp_path / "run" / "traces").mkdir()
        (tmp_path / "run" / "traces" / f"of-start-{start}").touch()
    kept = {
        path.name: [file.name for file in path.glob("of-*")] for path in (tmp_path / "run" / "earlier-traces").iterdir()
    }
    assert kept == {
        "to-step-00000007": ["of-start-0"], "to-step-00000007-2": ["of-start-1"], "to-step-00000007-3": ["of-start-2"],
    }  # fmt: skip
