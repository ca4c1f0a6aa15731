"""dist/console.py: what is printed never ends a job, and a program whose output nobody takes ends quietly."""

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist.console import say

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
SMALL = "--n-layer 1 --n-head 2 --n-embd 16 --context 16 --steps 3 --eval-every 0 --threads 1 --trace off"
ROOMS = ROOT / "dist", ROOT / "strategies", ROOT / "scripts" / "training"
JOBS = [path for room in ROOMS for path in sorted(room.rglob("*.py"))]


def run(*command, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run([sys.executable, *map(str, command)], env=environment, timeout=120, **options)


def nobody_reads():
    """The writing end of a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.fixture(params=["full disk", "broken pipe"])
def unwritable(request):
    place = os.open("/dev/full", os.O_WRONLY) if request.param == "full disk" else nobody_reads()
    yield place
    os.close(place)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_training_goes_on_whatever_becomes_of_its_lines(unwritable, tmp_path):
    result = run(
        ROOT / "scripts/train.py", *SMALL.split(), "--out", tmp_path / "run", stdout=unwritable, stderr=unwritable
    )
    assert result.returncode == 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_mistake_keeps_its_exit_code(unwritable):
    assert run(ROOT / "scripts/train.py", "--lr", "nan", stdout=unwritable, stderr=unwritable).returncode == 2


PROGRAM = "from dist.console import open_console\nopen_console()\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_small_program_ends_quietly(unwritable, unbuffered):
    program, options = f"{PROGRAM}print('a' * 100, flush=True)", {"env": {"PYTHONUNBUFFERED": unbuffered}}
    result = run("-c", program, stdout=unwritable, stderr=subprocess.PIPE, text=True, **options)
    assert result.returncode == 1
    assert result.stderr in ("", "error: standard output: No space left on device: write it elsewhere\n")
    quiet = run("-c", f"{PROGRAM}print('a')", stdout=nobody_reads(), stderr=subprocess.PIPE, text=True)
    assert quiet.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("printed", ["print('a')", "print('a' * 10**6)", "print('a', flush=True)"])
def test_what_was_printed_and_is_not_there_is_told_once(printed):
    """Also a line that Python keeps to the end, as behind `> FILE`."""
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "env": {"PYTHONUNBUFFERED": ""}}
        result = run("-c", f"{PROGRAM}{printed}", **options, stderr=subprocess.PIPE, text=True)
        assert result.returncode == 1
        assert result.stderr == "error: standard output: No space left on device: write it elsewhere\n"
        said = f"{PROGRAM}from dist.console import say\nsay('a')\nraise SystemExit(75)"
        assert run("-c", said, **options).returncode == 75


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [["scripts/job.py"], ["-m", "scripts", "--help"]], ids=["job.py", "gpt2-mpi"])
def test_half_of_what_a_program_prints_is_a_mistake(words):
    with open("/dev/full", "w") as full:
        result = run(*words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONUNBUFFERED": ""})
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)


def test_another_error_still_has_its_traceback():
    result = run("-c", f"{PROGRAM}open('/nowhere')", capture_output=True, text=True)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "FileNotFoundError" in result.stderr


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
def test_what_the_terminal_lacks_is_replaced(encoding):
    """Also a file name that is no UTF-8."""
    program = f"{PROGRAM}from dist.console import say\nsay('loss \\u2713 \\udcff')\nprint('\\udcff')"
    result = run("-c", program, capture_output=True, env={"PYTHONIOENCODING": encoding})
    assert result.returncode == 0
    assert result.stdout.decode(encoding) == ("loss \u2713 ?\n?\n" if encoding == "utf-8" else "loss ? ?\n?\n")


def test_say_without_a_prepared_stream(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", stream)
    say("val loss", "\u2713")
    assert stream.buffer.getvalue() == b"val loss ?\n"
    monkeypatch.setattr(sys, "stdout", None)
    say("nobody hears it")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_job_prints_by_say(path):
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    bare = [call.lineno for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert not bare or path.name == "console.py", f"lines {bare}: a progress line must not end a job"


def test_numbers_that_overflow_are_told_by_who_checks_them():
    result = run("-c", f"{PROGRAM}import numpy as np\nnp.float32(1e38) * np.float32(1e38)", capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
