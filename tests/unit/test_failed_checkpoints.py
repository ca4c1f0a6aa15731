"""A checkpoint that cannot be written is named; the one before stays, and the next one is tried."""

import errno
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2 import files
from gpt2.formats import checkpoint_files, checkpoints
from gpt2.formats.checkpoints import Checkpoint
from scripts.training import checkpointing
from tests.support.one_rank import one_rank

FULL = OSError(errno.ENOSPC, "No space left on device")
LOST = OSError(errno.EIO, "Input/output error")


def failing(error):
    def fail(*arguments, **options):
        raise error

    return fail


def without_room():
    """NumPy, on a machine without memory for the copy."""
    return SimpleNamespace(float32=np.float32, empty=failing(MemoryError()))


FAULTS = {
    "fsync": (files.os, "fsync", failing(LOST), "{}: Input/output error: free some space, or check the disk"),
    "write": (checkpoint_files, "new_file", failing(FULL), "{}: No space left on device: free some space, or check"),
    "part": (checkpoint_files, "write_part", failing(ValueError("odd")), "ValueError: odd"),
    "memory": (checkpoint_files, "write_part", failing(MemoryError()), "no memory left for a copy of the state: "),
    "copy": (checkpointing, "np", without_room(), "no memory left for a copy of the state: use more nodes"),
    "marker": (checkpoints, "complete", failing(FULL), "{}: No space left on device: free some space"),
    "facts": (checkpoints, "complete", failing(ValueError("nan")), "ValueError: nan"),
    "name": (checkpoints, "sync_folder", failing(LOST), "{}: Input/output error: free some space"),
}


@pytest.fixture
def run(tmp_path):
    run = one_rank(tmp_path, keep=1)
    run.save(1, goes_on=False)  # needs no memory for a copy
    return run


@pytest.mark.parametrize("what", FAULTS)
def test_what_fails_is_said_and_the_next_one_is_tried(run, capsys, monkeypatch, what):
    module, name, fault, says = FAULTS[what]
    with monkeypatch.context() as broken:
        broken.setattr(module, name, fault)
        run.save(2)
        run.checkpoints.settle([run.checkpoints.written()])  # as at the end of the next step
    said = capsys.readouterr().err
    assert said.startswith("rank 0 on cn0: the checkpoint of step 2 was not written: " + says.format(run.folder)), said
    assert said.count("\n") == 1
    assert run.names() == ["step-00000001"]
    run.save(3)
    assert capsys.readouterr().err == ""
    assert run.names() == ["step-00000003"]
    Checkpoint(run.folder / "step-00000003").check(0, 1)


@pytest.mark.parametrize("what", [what for what in FAULTS if what != "copy"])  # the last one needs none
def test_the_last_one_must_be_written(run, capsys, monkeypatch, what):
    module, name, fault, says = FAULTS[what]
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(SystemExit) as end:
        run.checkpoints.leave_last(6, None)
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: " + says.format(run.folder))
    assert run.names() == ["step-00000001"]


@pytest.mark.parametrize("error", [FULL, MemoryError()])
def test_a_model_that_cannot_be_written_costs_no_state(run, capsys, monkeypatch, error):
    monkeypatch.setattr(checkpointing.llmc, "make_header", failing(error))
    with pytest.raises(SystemExit) as end:
        run.checkpoints.leave_last(6, run.model)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run.names() == ["step-00000006"]
    Checkpoint(run.folder / "step-00000006").check(0, 1)


def test_an_old_one_that_stays_is_no_failure(run, capsys, monkeypatch):
    """Of a job that was told to keep one, on a disk that lets nothing be removed."""
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", failing(PermissionError(errno.EACCES, "Permission denied", "x")))
        run.save(2)
    said = capsys.readouterr().err
    assert said == (
        "rank 0 on cn0: an old checkpoint was not removed: x: Permission denied: free some space, or check the disk\n"
    )
    assert checkpoints.newest_first(run.folder)[0].name == "step-00000002"
    run.checkpoints.leave_last(6, None)
    assert checkpoints.newest_first(run.folder)[0].name == "step-00000006"


def test_nobody_reads_the_line(run, monkeypatch):
    """Standard error has gone: the next checkpoint is written all the same."""
    with monkeypatch.context() as broken:
        broken.setattr(sys, "stderr", SimpleNamespace(write=failing(FULL), flush=failing(FULL)))
        broken.setattr(checkpoint_files, "write_part", failing(FULL))
        run.save(2)
    run.save(3)
    assert run.names() == ["step-00000003"]
