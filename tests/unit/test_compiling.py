"""gpt2/kernels/numpy/compiling.py: each form is compiled once, whoever starts with whom, and none is mistaken."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2.errors import UserError
from gpt2.files import alone
from gpt2.kernels.numpy import compiling
from gpt2.kernels.numpy.compiling import FormCache, Forms

LOOP = """
from gpt2.kernels.numpy.compiling import compiled

@compiled
def double(x):
    return x + x
"""
# Ready, it waits for the others; then it says what came out, and how many forms it has compiled itself.
PROCESS = """
import sys, loop
print("ready", flush=True)
sys.stdin.readline()
print(loop.double(21), loop.double(1.5), sum(loop.double.stats.cache_misses.values()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of a module with a loop; caches and locks are there, too."""
    (tmp_path / "loop.py").write_text(LOOP)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def start(folder, code=PROCESS):
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_processes_that_start_at_once_compile_each_form_once(folder):
    processes = [start(folder) for _ in range(3)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate()[0].split() for process in processes]
    assert [numbers for *numbers, _ in told] == [["42", "3.0"]] * 3
    assert sum(int(compiled) for *_, compiled in told) == 2, told
    assert not list(folder.rglob("*.lock"))


def test_who_dies_while_it_compiles_holds_nobody_up(folder):
    code = "from gpt2.files import *\nwith alone(Path(sys.argv[1]), 9): print(1, flush=True), time.sleep(99)"
    lock = folder / "lock"
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "1\n"
    began = time.monotonic()
    with alone(lock, 0.2):
        assert time.monotonic() - began >= 0.2, "it lives"
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    with alone(lock, 60.0):
        pass
    assert time.monotonic() - began < 30


def test_forms_of_one_function_do_not_touch_each_other(tmp_path):
    """Processes that know nothing of one another's forms, as two that began at once on an empty cache."""
    ours, theirs = (Forms(tmp_path, "loop", ("1.0", b"source")) for _ in range(2))
    ours.save(("float32", "zen4"), "A")
    theirs.save(("float32", "zen2"), "B")
    theirs.save(("uint16", "zen4"), "C")
    for cache in (ours, theirs):
        found = [cache.load(key) for key in (("float32", "zen4"), ("float32", "zen2"), ("uint16", "zen4"))]
        assert found == ["A", "B", "C"]
    assert ours.load(("float64", "zen4")) is None
    assert Forms(tmp_path, "loop", ("1.0", b"another")).load(("float32", "zen4")) is None
    assert Forms(tmp_path, "loop", ("1.1", b"source")).load(("float32", "zen4")) is None
    path = ours.path(("uint16", "zen4"))
    path.write_bytes(path.read_bytes()[:-3])
    assert ours.load(("uint16", "zen4")) is None, "it is damaged"
    ours.path(("float32", "zen4")).replace(ours.path(("float32", "zen2")))
    assert ours.load(("float32", "zen2")) is None, "its own key does not say so"


def test_a_change_beside_the_function_is_a_change(tmp_path):
    """What builds it lies in another file of the folder."""
    hashes = []
    for name, text in (("loop.py", "a"), ("words.py", "b"), ("words.py", "c"), ("note.md", "d")):
        (tmp_path / name).write_text(text)
        compiling.sources.cache_clear()
        hashes.append(compiling.sources(tmp_path / "loop.py"))
    assert len(set(hashes[:3])) == 3
    assert hashes[3] == hashes[2]
    assert compiling.compiled(double)._cache._cache_file.stamp[-1] == compiling.sources(Path(__file__))


def double(x):
    return x + x


@pytest.mark.parametrize("error", [OSError("disk full"), UserError("disk full")])
def test_a_full_disk_costs_the_cache_alone(folder, monkeypatch, error):
    def save(self, key, form):
        raise error

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(Forms, "save", save)
    monkeypatch.setattr(compiling, "machine_folder", lambda: folder)
    loop = compiling.compiled(double)
    assert isinstance(loop._cache, FormCache)
    assert loop(4) == 8
    assert not loop._cache._locks
    assert not list(folder.rglob("*.lock"))
