"""traces/read/tails.py: of long files that grow, the last whole steps and lines."""

import json

import numpy as np
import pytest

from tests.support import faulty_runs
from traces import read_run
from traces.read.run_files import read_log
from traces.read.tails import from_a_whole_step, read_lines, sizes
from traces.record.files import COUNTERS, RECORD, trace_path
from traces.record.phases import INDEX, STEP

pytestmark = pytest.mark.any_mpi


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return faulty_runs.make(tmp_path_factory.mktemp("run"), steps=30)


@pytest.mark.parametrize("most_bytes", [*range(36 * 20, 36 * 28, 31), 36 * 100 + 5])
def test_the_last_whole_steps_of_each_rank(run, most_bytes):
    """Wherever the file is cut, the records of all whole steps that fit are read, and nothing else."""
    part = read_run(run.path, most_bytes=most_bytes)
    for whole, kept in zip(run.ranks, part.ranks, strict=True):
        assert 0 < len(kept.records) * RECORD.itemsize <= most_bytes
        np.testing.assert_array_equal(kept.records, whole.records[-len(kept.records) :])
        first = kept.records["step"][0]
        assert len(kept.records) == np.count_nonzero(whole.records["step"] >= first), "no step by half"
        step_bytes = np.count_nonzero(whole.records["step"] == first) * RECORD.itemsize
        assert len(kept.records) * RECORD.itemsize + 2 * step_bytes > most_bytes
    for whole, kept in zip(run.counters, part.counters, strict=True):
        count = min(len(whole.records), most_bytes // COUNTERS.itemsize)
        np.testing.assert_array_equal(kept.records, whole.records[-count:])


def test_short_files_are_read_as_a_whole(run):
    part = read_run(run.path, most_bytes=10_000_000)
    for whole, kept in zip(run.ranks, part.ranks, strict=True):
        np.testing.assert_array_equal(kept.records, whole.records)
    assert part.log == run.log
    only_phases = run.ranks[0].records[run.ranks[0].records["phase"] != INDEX[STEP]]
    assert len(from_a_whole_step(only_phases)) == 0


def test_a_record_that_is_there_by_half(run, tmp_path):
    """Cut at every byte of the last two records, as a reader sees a file that is being appended to."""
    path = trace_path(run.path / "traces", 0)
    content = path.read_bytes()
    try:
        for missing in range(1, 2 * RECORD.itemsize, 7):
            path.write_bytes(content[:-missing])
            kept = read_run(run.path, most_bytes=36 * 40).ranks[0].records
            assert kept["end"][-1] == run.ranks[0].records["end"][-1 - -(-missing // RECORD.itemsize)]
    finally:
        path.write_bytes(content)


def test_the_last_whole_lines_of_a_long_log(tmp_path):
    """Wherever the file is cut, all whole lines that fit are read, and nothing else."""
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "loss": 1 / step, "pad": "x" * (step % 50)}) for step in range(1, 20_001)]
    torn = '{"step": 20001, "lo'
    path.write_text("\n".join([*lines, torn]))
    lengths = np.cumsum([len(torn), *(len(line) + 1 for line in reversed(lines))])
    for most_bytes in (100, 100_000, 100_001, 333_333, *lengths[[1, 2, 500]], *(lengths[[1, 2, 500]] - 1)):
        found = [line.decode() for line in read_lines(path, int(most_bytes))]
        count = np.searchsorted(lengths, most_bytes, side="right") - 1
        assert found == lines[len(lines) - count :], most_bytes
    assert [row["step"] for row in read_log(tmp_path, most_bytes=100_000)][-1] == 20_000
    assert len(read_lines(path)) == len(read_lines(path, 10**9)) == 20_000
    (tmp_path / "empty").touch()
    assert read_lines(tmp_path / "empty", 100) == []


def test_sizes_tell_whether_anything_was_written(tmp_path):
    assert sizes(tmp_path / "none") == {}
    (tmp_path / "a").write_bytes(b"1")
    before = sizes(tmp_path)
    assert sizes(tmp_path) == before
    (tmp_path / "a").write_bytes(b"12")
    assert sizes(tmp_path) != before
