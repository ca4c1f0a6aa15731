"""gpt2/kernels/numpy/compiling.py: each form is compiled once, whoever starts with whom, and none is mistaken."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time

import pytest

from gpt2.errors import UserError
from gpt2.files import alone, machine_folder, user_cache_folder
from gpt2.kernels.numpy import compiling, loops
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


def forms(folder, stamp=("1.0", b"source"), others=0):
    return Forms(folder, "loop", stamp, {os.getuid() + others})


class MakesFolder:
    """As it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_file_of_another_user_is_not_unpickled(tmp_path):
    """Where a folder of all users, as in /tmp, is the cache."""
    made = tmp_path / "made"
    forms(tmp_path).save("float32", MakesFolder(made))
    assert forms(tmp_path, others=1).load("float32") is None
    assert not made.exists()
    forms(tmp_path).load("float32")
    assert made.exists()


def test_files_of_this_user_of_root_and_of_who_may_change_the_source_are_read(folder, monkeypatch):
    if os.geteuid() == 0:
        os.chown(folder / "loop.py", 4712, -1)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    loop = runpy.run_path(str(folder / "loop.py"))["double"]
    assert loop._cache._cache_file.owners == {4711, 0, (folder / "loop.py").stat().st_uid}


def test_forms_of_one_function_do_not_touch_each_other(tmp_path):
    """Processes that know nothing of one another's forms, as two that began at once on an empty cache."""
    ours, theirs = (forms(tmp_path) for _ in range(2))
    ours.save(("float32", "zen4"), "A")
    theirs.save(("float32", "zen2"), "B")
    theirs.save(("uint16", "zen4"), "C")
    for cache in (ours, theirs):
        found = [cache.load(key) for key in (("float32", "zen4"), ("float32", "zen2"), ("uint16", "zen4"))]
        assert found == ["A", "B", "C"]
    assert ours.load(("float64", "zen4")) is None
    assert forms(tmp_path, ("1.0", b"another")).load(("float32", "zen4")) is None
    assert forms(tmp_path, ("1.1", b"source")).load(("float32", "zen4")) is None
    path = ours.path(("uint16", "zen4"))
    path.write_bytes(path.read_bytes()[:-3])
    assert ours.load(("uint16", "zen4")) is None, "it is damaged"
    ours.path(("float32", "zen4")).replace(ours.path(("float32", "zen2")))
    assert ours.load(("float32", "zen2")) is None, "its own key does not say so"


def test_what_stands_in_another_file_is_compiled_anew_when_that_changes(folder):
    """numba looks at the function's own file alone."""
    helper = "from numba.extending import register_jitable\nfrom wheel import factor\n\n"
    helper += "@register_jitable\ndef times(x):\n    return factor * x\n"
    (folder / "helper.py").write_text(helper)
    (folder / "wheel.py").write_text("factor = 2\n")
    (folder / "loop.py").write_text(LOOP.replace("x + x", "helper.times(x)").replace("\n\n@", "\nimport helper\n\n@"))
    assert start(folder).communicate("go\n")[0].split()[1:] == ["42", "3.0", "2"]
    assert start(folder).communicate("go\n")[0].split()[1:] == ["42", "3.0", "0"], "nothing has changed"
    (folder / "helper.py").write_text(helper.replace("* x", "* x + 1"))
    assert start(folder).communicate("go\n")[0].split()[1:] == ["43", "4.0", "2"]
    (folder / "wheel.py").write_text("factor = 3\n")
    assert start(folder).communicate("go\n")[0].split()[1:] == ["64", "5.5", "2"], "what that one imports"


def test_without_any_place_for_temporary_files_each_process_compiles_for_itself(folder, monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert (machine_folder(), user_cache_folder()) == (None, None)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(folder / "cache"))
    assert compiling.compiled(double)(4) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_link_of_another_user_among_the_temporary_files_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "own").mkdir()
    link = tmp_path / f"gpt2-mpi-{os.getuid()}"
    link.symlink_to(tmp_path / "own")
    assert machine_folder() == link
    os.lchown(link, os.getuid() + 1, -1)
    assert machine_folder() is None


def double(x):
    return x + x


@pytest.mark.parametrize("error", [OSError("disk full"), UserError("disk full")])
def test_a_full_disk_costs_the_cache_alone(folder, monkeypatch, error):
    def save(self, key, form):
        raise error

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(Forms, "save", save)
    monkeypatch.setattr(FormCache, "keeps", True)
    monkeypatch.setattr(compiling, "machine_folder", lambda: folder)
    locked = []
    monkeypatch.setattr(compiling, "alone", lambda lock, wait_s: locked.append(lock) or alone(lock, wait_s))
    loop = compiling.compiled(double)
    assert isinstance(loop._cache, FormCache)
    assert loop(4) == 8
    assert not loop._cache._locks
    assert not list(folder.rglob("*.lock"))
    assert loop(0.5) == 1.0
    assert len(locked) == 1, "ranks of a node would compile each form one after another"


def test_loops_compile_where_no_folder_takes_the_cache(tmp_path):
    """A read-only installation, used by someone without a home folder."""
    shutil.copy(loops.__file__, tmp_path / "loops.py")
    (tmp_path / "__pycache__").write_text("no folder")
    code = "import loops, numpy; a = numpy.ones(3); loops.adamw(a, a, a, a, *numpy.ones(6)); print(a[0])"
    environment = {name: os.environ[name] for name in os.environ.keys() - {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}}
    command = [sys.executable, "-B", "-c", code]
    environment |= {"HOME": os.devnull}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
