"""`make setup` names the Python that it found, before it installs anything, where that is none to work with."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]


def setup(python, venv):
    """`make setup` as a user calls it, whose own variables do not matter."""
    command = ["make", "setup", f"PYTHON={python}", f"VENV={venv}", "MAKEFLAGS="]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def older_python(tmp_path):
    """A program that runs Python's -c, and says that it is 3.10; whatever else it is asked, it makes `touched`."""
    path = tmp_path / "python3.10"
    path.write_text(
        f"#!/bin/sh\n[ \"$1\" = -c ] || touch '{tmp_path}/touched'\n"
        f"exec '{sys.executable}' -c 'import sys; sys.version_info = (3, 10, 4); exec(sys.argv[1])' \"$2\"\n"
    )
    path.chmod(0o755)
    return path


def test_an_older_python_is_named_at_once(tmp_path, older_python):
    result = setup(older_python, tmp_path / "venv")
    assert result.returncode == 2
    assert f"{older_python} is Python 3.10, expected 3.11 or newer: name one" in result.stderr
    assert not (tmp_path / "touched").exists()


def test_a_python_that_is_not_there(tmp_path):
    result = setup("python3.99", tmp_path / "venv")
    assert result.returncode == 2
    assert "no python3.99 on PATH" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_an_mpi_that_does_not_load_is_said(tmp_path):
    """By dist/mpi.py, once mpi4py is installed."""
    command = ["make", "--dry-run", "--no-print-directory", "setup", f"VENV={tmp_path}/venv", "MAKEFLAGS="]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in result.stdout.splitlines() if not line.startswith("make")]
    assert lines[-2:] == [f"{tmp_path}/venv/bin/python -m dist.mpi", f"touch {tmp_path}/venv/installed"]
