"""The lock of a run folder: who may have it, who may take it over, and that however many want it one has it."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2.errors import UserError
from scripts.training import lock_file
from scripts.training.lock_file import CLAIM, LOCK, Lock, is_running, look, own_lock, take

pytestmark = pytest.mark.any_mpi
RACERS, ROUNDS = 8, 12


@pytest.fixture
def soon(monkeypatch):
    """A holder counts as gone, and a claim as left, within a short time."""
    monkeypatch.setattr(lock_file, "OLD_S", 0.4)
    monkeypatch.setattr(lock_file, "PAUSE_S", 0.02)


@pytest.fixture
def said():
    return []


def elsewhere(**facts):
    """The lock of a process on another machine."""
    return replace(own_lock(), boot="another", host="far", **facts)


def ended():
    """The lock of a process of this machine that has ended."""
    program = "from scripts.training.lock_file import own_lock; print(own_lock().content().decode())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return Lock(**json.loads(done.stdout))


def leave(folder, lock):
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_bytes(lock.content())
    return folder / LOCK


def test_a_lock_says_whose_it_is_and_that_it_lives(tmp_path):
    own = own_lock()
    path = leave(tmp_path, own)
    assert replace(look(path), touched_ns=0) == own
    assert own.run != own_lock().run
    assert (own.pid, own.host) == (os.getpid(), os.uname().nodename)
    assert is_running(own)
    assert is_running(ended()) is False


def test_a_pid_counts_only_where_it_was_given(monkeypatch):
    """On another machine, or in another container, the same number is another process."""
    boot, namespace = own_lock().boot.split(" ")
    for other in (f"another {namespace}", f"{boot} pid:[1]", ""):
        assert is_running(replace(own_lock(), boot=other)) is None
    # Where /proc shows the processes of another namespace, no pid counts.
    monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else namespace)
    assert own_lock().boot == ""
    assert is_running(own_lock()) is None


def test_taking_makes_the_folder_and_releasing_leaves_nothing(tmp_path, said):
    held = take(tmp_path / "runs" / "one", own_lock(), False, said.append)
    assert look(tmp_path / "runs" / "one" / LOCK).run == held.lock.run
    assert held.is_own()
    held.release()
    assert not list(tmp_path.iterdir())
    (tmp_path / "notes").touch()
    take(tmp_path, own_lock(), False, said.append).release()
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert said == []


def test_who_lives_is_named_and_unharmed(tmp_path, said):
    held = take(tmp_path, own_lock(), False, said.append)
    begun = time.monotonic()
    with pytest.raises(UserError, match=rf"process {os.getpid()} on {os.uname().nodename}.*--take-over") as error:
        take(tmp_path, own_lock(), False, said.append)
    assert time.monotonic() - begun < lock_file.OLD_S / 2, "nobody need wait to see that it lives"
    assert "\n" not in str(error.value)
    assert held.is_own()
    assert said == []
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("how", ["it has ended", "its pid is another's", "not reaped"])
def test_who_has_ended_is_replaced_at_once(tmp_path, said, how):
    child = subprocess.Popen(["true"])
    if how == "it has ended":
        lock = ended()
    elif how == "its pid is another's":
        lock = replace(own_lock(), born=own_lock().born - 1)
    else:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        born = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        lock = replace(own_lock(), pid=child.pid, born=born)
    leave(tmp_path, lock)
    held = take(tmp_path, own_lock(), False, said.append)
    child.wait()
    assert held.is_own()
    assert len(said) == 1
    assert f"taken over from process {lock.pid} on" in said[0]
    assert "it has ended" in said[0]
    held.release()
    assert not list(tmp_path.iterdir())


@contextmanager
def touching(path):
    """As a holder does."""
    stopped = threading.Event()

    def touch():
        while not stopped.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def test_elsewhere_the_heartbeat_tells(tmp_path, said, soon):
    path = leave(tmp_path, elsewhere(job="77"))
    with touching(path), pytest.raises(UserError, match=r"process \d+ on far, SLURM job 77"):
        take(tmp_path, own_lock(), False, said.append)
    assert "watching for up to" in said[-1]
    held = take(tmp_path, own_lock(), False, said.append)
    assert held.is_own()
    assert "it showed no life for 0.4 s" in said[-1]
    assert len(said) == 3


def test_take_over_does_not_ask(tmp_path, said):
    first = take(tmp_path, own_lock(), False, said.append)
    second = take(tmp_path, own_lock(), True, said.append)
    assert (first.is_own(), second.is_own()) == (False, True)
    before = look(tmp_path / LOCK)
    first.release()
    assert look(tmp_path / LOCK) == before, "who has lost a lock does not remove the other's"
    second.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", [own_lock, elsewhere])
def test_a_start_takes_over_from_one_before_it_of_the_same_supervisor(tmp_path, said, soon, where):
    """Which it has ended: what still touches the lock is out of the reach of its launcher."""
    path = leave(tmp_path, replace(where(), supervisor="a" * 32))
    with touching(path):
        for other in ("", "b" * 32):
            with pytest.raises(UserError, match="the run is being trained by"):
                take(tmp_path, own_lock(other), False, said.append)
        said.clear()
        held = take(tmp_path, own_lock("a" * 32), False, said.append)
    assert held.is_own()
    [line] = said
    assert line.endswith("it is an earlier start of the same --restarts; if it still runs, it ends now")


NOT_LOCKS = {
    "empty": b"",
    "garbage": bytes(range(256)),
    "cut": own_lock().content()[:-20],
    "deep": b"[" * 10_000,
    "a number": b"7",
    "another format": own_lock().content().replace(b"lock 1", b"lock 2"),
    "a pid that is none": own_lock().content().replace(b'"pid": ', b'"pid": -'),
    "a pid that is true": own_lock().content().replace(b'"pid": %d' % os.getpid(), b'"pid": true'),
    "two lines in a name": replace(own_lock(), host="a\nb").content(),
    "huge": b"x" * 10_000_000,
}


@pytest.mark.parametrize("what", NOT_LOCKS)
def test_a_damaged_lock_is_judged_by_its_heartbeat(tmp_path, said, soon, what):
    path = tmp_path / LOCK
    path.write_bytes(NOT_LOCKS[what])
    assert not look(path).run
    with touching(path), pytest.raises(UserError, match="whose lock is damaged"):
        take(tmp_path, own_lock(), False, said.append)
    held = take(tmp_path, own_lock(), False, said.append)
    assert held.is_own()
    held.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_and_stays(tmp_path, said, make):
    make(tmp_path / LOCK)
    for refuse in (look, lambda path: take(path.parent, own_lock(), True, said.append)):
        with pytest.raises(UserError, match=rf"{LOCK}: .*remove it") as error:
            refuse(tmp_path / LOCK)
        assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_folder_that_cannot_be_one(tmp_path, said):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="choose another --out"):
            take(folder, own_lock(), False, said.append)


@pytest.mark.parametrize("change", ["replaced", "touched"])
def test_a_lock_that_changes_while_it_is_judged_stays(tmp_path, monkeypatch, said, change):
    """Another process replaces it, or its holder touches it, while this one claims it."""
    path = leave(tmp_path, replace(ended(), supervisor="a" * 32))
    other = replace(own_lock(), host="far", boot="")
    create = lock_file._create

    def late(path, content):
        create(path, content)
        if change == "replaced":
            path.with_name(LOCK).write_bytes(other.content())
        os.utime(path.with_name(LOCK), ns=(0, 1))

    monkeypatch.setattr(lock_file, "_create", late)
    judged = look(path)
    assert not lock_file._take_over(path, own_lock("b" * 32), False, said.append)
    assert look(path).run == (other if change == "replaced" else judged).run
    assert said == []
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_claim_that_was_left_does_not_bar_the_way(tmp_path, said, soon):
    path = leave(tmp_path, ended())
    (tmp_path / CLAIM).touch()
    held = take(tmp_path, own_lock(), False, said.append)
    assert held.is_own()
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / CLAIM).touch()
    held.release()
    assert not list(tmp_path.iterdir())


def race(folder, anyway, start, end, results):
    for _ in range(ROUNDS):
        start.wait()
        try:
            held = take(folder, own_lock(), anyway, lambda line: None)
        except UserError:
            held = None
        end.wait()  # all have tried
        results.put((held is not None, held is not None and held.is_own()))
        end.wait()  # all have looked
        if held:
            held.release()
        end.wait()


@pytest.mark.parametrize("case", ["no lock", "a dead one's", "take over"])
def test_of_many_that_race_one_has_it(tmp_path, case):
    """Each round they all start at once, from no lock, or from one whose holder has ended."""
    processes = multiprocessing.get_context("fork")
    start, end, results = processes.Barrier(RACERS + 1), processes.Barrier(RACERS + 1), processes.Queue()
    arguments = tmp_path, case == "take over", start, end, results
    racers = [processes.Process(target=race, args=arguments, daemon=True) for _ in range(RACERS)]
    dead = ended()
    for racer in racers:
        racer.start()
    for number in range(ROUNDS):
        if case != "no lock":
            leave(tmp_path, replace(dead, run=f"{number:032x}"))
        start.wait(60)
        end.wait(60)
        found = [results.get(timeout=60) for _ in racers]
        assert sum(has for _, has in found) == 1, "one has it"
        assert sum(took for took, _ in found) == (RACERS if case == "take over" else 1)
        end.wait(60)
        end.wait(60)
        assert list(tmp_path.iterdir()) == []
    for racer in racers:
        racer.join(60)
