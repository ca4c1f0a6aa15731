"""dist/shared_memory.py: what /dev/shm lacks is said before anyone dies of it; what killed jobs left is named."""

import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dist import shared_memory
from dist.probe.programs import mpirun_command, mpirun_environment
from dist.shared_memory import left_segments, remove_left_segments, rm_command, start_problem

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """Segments of killed jobs, one that this process maps, and a file of somebody else."""
    for name in ("mpich_shm_7581_0", "sm_segment.vm.0.21c10001.0", "mpich_shm_used_0", "mpich_shm_new_0", "mine.txt"):
        (tmp_path / name).write_bytes(bytes(8192))
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "sm_segment.vm.0.21c10001.0").write_bytes(bytes(65536))
    return tmp_path


def test_segments_that_no_process_maps_are_named(folder, monkeypatch):
    long_ago = time.time() + 100  # all files were made that long ago
    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(time=lambda: long_ago))
    with (folder / "mpich_shm_used_0").open("r+b") as file:
        used = mmap.mmap(file.fileno(), 0)
    left = left_segments(str(folder))
    assert Path(left[0][0]).name == "sm_segment.vm.0.21c10001.0", "the largest first"
    assert {Path(path).name for path, _ in left[1:]} == {"mpich_shm_7581_0", "mpich_shm_new_0"}
    assert left[0][1] == 65536
    used.close()
    assert len(left_segments(str(folder))) == 4
    assert rm_command(left_segments(str(folder))).endswith(" and 1 more")
    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(time=lambda: long_ago - 95))
    assert left_segments(str(folder)) == [], "a job may be about to map it"
    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(time=lambda: long_ago))
    assert len(remove_left_segments(str(folder))) == 4
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_what_mpich_needs_to_start(monkeypatch):
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 64 << 20)
    monkeypatch.setattr(shared_memory, "_segments", lambda folder, is_old: [])
    assert start_problem({"MPI_LOCALNRANKS": "60"}) is None
    found = start_problem({"MPI_LOCALNRANKS": "64"})
    assert "/dev/shm has 67.1 MB free, expected 70.4 MB for the start of MPICH with 64 ranks" in found
    assert "docker --shm-size" in found
    assert start_problem({"MPI_LOCALNRANKS": "\u00b2"}) is None
    monkeypatch.setattr(shared_memory, "_segments", lambda folder, is_old: [] if is_old else [("", 10 << 20)])
    assert start_problem({"MPI_LOCALNRANKS": "64"}) is None, "another rank of this job has taken its share"


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root mounts a /dev/shm of its own"
)
def test_a_small_dev_shm_is_one_line():
    """Under MPICH; Open MPI looks by itself."""
    program = "from dist.world import start_world; start_world()"
    command = [*mpirun_command(2), sys.executable, "-c", program]
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    environment = mpirun_environment(2) | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", *command],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    from dist.world import library_name

    if "MPICH" not in library_name():
        pytest.skip("Open MPI says it in words of its own")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: ") == 1
    assert "for the start of MPICH with 2 ranks" in result.stderr
