"""scripts/training/restarts.py: when the ranks start again, and when not; under a launcher that plays a plan."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from gpt2.errors import UserError
from scripts import train
from scripts.training import launched_ranks
from scripts.training import restarts as module
from scripts.training.launched_ranks import GONE_S, LaunchedRanks, SignsOfLife
from scripts.training.lock_file import LOCK, own_lock
from scripts.training.restarts import last_step, misused, newest_step, supervise, without_lost_nodes, without_own_flags
from tests.suites.faults.processes import is_zombie, wait_until

pytestmark = pytest.mark.any_mpi
# Plays one line of the plan a start: {"step", "checkpoint", "from", "code", "summary", "wait"}; notes words, signals.
LAUNCHER = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
folder = Path({folder!r})
if sys.argv[1:] == ["--version"]:
    print({version!r})
    raise SystemExit
plan, run = folder / "plan.jsonl", folder / "run"
first, *rest = plan.read_text().splitlines()
plan.write_text("".join(line + "\\n" for line in rest))
now = json.loads(first)
def note(number, frame):
    with open(folder / "signals", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number != signal.SIGUSR1:
        raise SystemExit(75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, note)
with open(folder / "words", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
run.mkdir(exist_ok=True)
if "silent" not in now:
    lines = [json.dumps({{"step": step}}) + "\\n" for step in range(1, now["step"] + 1)]
    (run / "log.jsonl").write_text("".join(lines))
    (run / "config.json").write_text(json.dumps({{"resumed_step": now.get("from")}}))
if now.get("checkpoint"):
    checkpoint = run / "checkpoints" / f"step-{{now['checkpoint']:08}}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "checkpoint.json").write_text("{{}}")
if now.get("summary"):
    (run / "summary.json").write_text("{{}}")
(folder / "plays").touch()
if "deaf" in now:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if child := os.fork():
        (folder / "rank").write_text(str(child))
time.sleep(now.get("wait", 0))
if now["code"] < 0:
    os.kill(os.getpid(), -now["code"])
raise SystemExit(now["code"])
"""


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """play(starts, restarts): the exit code, what was said, and the pauses between starts."""
    numbers = (*launched_ranks.ENDING, signal.SIGUSR1)
    before, mask = (
        {number: signal.getsignal(number) for number in numbers},
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    )
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, has it ignored
    for name in (*module.RANKS, "SLURM_STEP_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    pauses, wait = [], LaunchedRanks.ends_within
    monkeypatch.setattr(LaunchedRanks, "ends_within", lambda self, s: pauses.append(s) or wait(self, min(s, 0.01)))

    def play(starts, restarts=5, version="HYDRA build details", launcher="mpirun", limit_s=0.0, minutes=0.0):
        program = tmp_path / launcher
        program.write_text(LAUNCHER.format(python=sys.executable, folder=str(tmp_path), version=version))
        program.chmod(0o755)
        (tmp_path / "plan.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
        words = ["--restarts", "5", "--steps", "9", "--launcher=x", "--out", "run"]
        code = supervise(restarts, f"{program} -n 2", str(tmp_path / "run"), limit_s, minutes, words)
        return code, capsys.readouterr().out, pauses

    yield play
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in before.items():
        signal.signal(number, handler)


def start(step, code, checkpoint=0, **more):
    return {"step": step, "code": code, "checkpoint": checkpoint, **more}


def test_each_start_goes_on_until_all_is_done(play, tmp_path):
    code, said, _ = play([start(5, 137), start(7, -9, 6), start(8, 255, 6), DONE])
    assert code == 0
    assert said.splitlines() == [
        "train.py: the ranks ended with code 137 after step 5: they start again in 5 s, from the beginning",
        "train.py: the ranks ended with code 137 after step 7: they start again in 5 s, from the checkpoint of step 6",
        "train.py: the ranks ended with code 255 after step 8: they start again in 10 s, from the checkpoint of step 6",
        "train.py: the run has ended well",
    ]
    words = [json.loads(line) for line in (tmp_path / "words").read_text().splitlines()]
    number = words[0][-1]
    ranks = [sys.executable, str(module.TRAIN), "--steps", "9", "--out", "run", "--resume", "--end-on-stall", number]
    assert words == [["-n", "2", *ranks]] * 4
    assert re.fullmatch("--supervisor=[0-9a-f]{32}", number)
    play([DONE])
    assert json.loads((tmp_path / "words").read_text().splitlines()[-1])[-1] != number, "another process's"


def test_a_step_that_fails_twice_ends_it(play, tmp_path):
    code, said, _ = play([start(5, 137, 4), start(7, 1, 6), start(7, 255, 6), DONE])
    assert code == 255
    assert said.splitlines()[-1] == (
        "train.py: the run has failed twice after step 7, with no checkpoint in between: look there, no restart helps"
    )
    kept = [json.loads(line) for line in (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()]
    assert [(line["code"], line["step"], line["checkpoint"]) for line in kept] == [(137, 5, 4), (1, 7, 6), (255, 7, 6)]
    assert [line["ends"] is None for line in kept] == [True, True, False]
    assert all(line["began"] <= line["ended"] for line in kept)


DONE = start(9, 0, summary=True)
SILENT = start(0, 9, silent=True)  # it comes to no step
# What the starts do, options of play; the exit code, what is said (None: nothing in particular), the pauses.
COURSES = {
    "no step at all, twice": ([start(0, 1, silent=True), SILENT, DONE], {}, 9, "twice before its first step", [5]),
    "a start without a step hides no second failure": (
        [start(7, 1, 6), SILENT, start(7, 255, 6), DONE], {}, 255, "has failed twice after step 7", [5, 10],
    ),
    "nor does one that was taken up": (
        [start(7, 1, 6), start(6, 9, 6, **{"from": 6}), start(7, 255, 6, **{"from": 6}), DONE],
        {}, 255, "has failed twice after step 7", [5, 10],
    ),
    "a newer checkpoint makes it another failure": (
        [start(7, 1, 6), SILENT, start(7, 1, 7), SILENT, DONE], {}, 0, None, [5, 10, 5, 10],
    ),
    "a start that failed after its summary": (
        [start(9, 1, 8, summary=True), start(9, 0, 9, summary=True)],
        {}, 0, "ended with code 1 after step 9: they start again", [5],
    ),
    "pauses double until there is a checkpoint": (
        [start(1, 1), start(2, 1), start(3, 1), start(4, 1, 4), start(5, 1, 4), DONE], {}, 0, None, [5, 10, 20, 5, 10],
    ),
    "no restarts left": (
        [start(step, 1, step) for step in range(1, 5)],
        {"restarts": 2}, 1, "failed after step 3, and no restarts are left: raise --restarts", [5, 5],
    ),
    "a mistake": ([start(5, 2, 4)], {}, 2, "no restart after exit code 2", []),
    "SIGTERM to the ranks": ([start(5, 75, 4)], {}, 75, "a signal", []),
    "Ctrl-C to the ranks": ([start(5, 130, 4)], {}, 130, "a signal", []),
    # Open MPI's mpirun reports success where a host has died.
    "success without a summary": (
        [start(5, 0, 4), start(9, 0, 8, summary=True)],
        {}, 0, "ended with code 0 after step 5: they start again", [5],
    ),
    "success twice without a summary": ([start(9, 0, 8), start(9, 0, 8)], {}, 1, "failed twice after step 9", [5]),
    "no minutes left": (
        [start(5, 9, 4, wait=0.7), DONE], {"minutes": 0.09}, 9,
        "the run has failed after step 5, and --minutes end before another start: the same command continues", [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("course", COURSES)
def test_when_the_ranks_start_again(play, course):
    starts, options, code, says, pauses = COURSES[course]
    ended, said, paused = play(starts, **options)
    assert (ended, paused) == (code, pauses)
    assert says is None or says in said


def test_a_start_that_has_only_taken_the_log_up_has_made_no_step(play, tmp_path):
    """The log ends with its checkpoint's step, anew written."""
    taken_up = {"step": 6, "code": 124, "from": 6}
    code, said, _ = play([start(7, 1, 6), taken_up, taken_up, DONE])
    assert code == 0
    assert said.count("ended with code 124 before its first step: they start again") == 2
    kept = [json.loads(line) for line in (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kept] == [7, 0, 0, 9]
    assert last_step(tmp_path / "run") == 9


@pytest.mark.parametrize("first", [start(7, 1), start(7, 1, 6), start(0, 1, 6, silent=True)])
def test_a_run_that_has_trained_waits_until_its_hosts_are_back(play, first):
    """Nobody reaches a host whose cable is cut: each start fails before its first step."""
    away = [start(0, 255, silent=True)] * 3
    code, said, pauses = play([first, *away, DONE])
    assert (code, pauses) == (0, [5, 10, 20, 40])
    assert said.count("ended with code 255 before its first step: they start again") == 3
    code, said, _ = play([first, *away, DONE], restarts=3)
    assert code == 255
    assert "has failed before its first step, and no restarts are left" in said


@pytest.mark.parametrize(
    ("launcher", "version", "sent", "comes"),
    [
        ("mpirun", "HYDRA build details", signal.SIGTERM, "SIGTERM"),
        ("mpirun", "HYDRA build details", signal.SIGUSR2, "SIGTERM"),
        ("mpirun", "HYDRA build details", signal.SIGINT, "SIGINT"),
        ("mpirun", "mpirun (Open MPI) 5.0", signal.SIGTERM, "SIGUSR2"),
        ("srun", "slurm 22.05", signal.SIGINT, "SIGUSR2"),
        ("mpirun", "HYDRA build details", signal.SIGHUP, "SIGTERM"),
    ],
)
def test_signals_come_as_the_launcher_hands_them_on(play, tmp_path, launcher, version, sent, comes):
    def send():
        while not (tmp_path / "plays").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not (tmp_path / "signals").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), sent)

    sender = threading.Thread(target=send)
    sender.start()
    code, said, pauses = play([start(5, 1, 4, wait=20)], version=version, launcher=launcher)
    sender.join()
    assert (code, pauses) == (75, [])
    assert "a signal ended the run after step 5" in said
    assert (tmp_path / "signals").read_text().split() == ["SIGUSR1", comes]


def test_a_signal_that_interrupts_the_handler_of_another_does_not_block_it(play):
    """At every line that the first handler runs, the library's included."""
    ranks, lines = LaunchedRanks("srun", Path("run"), 0.0), []

    def interrupt(frame, event, argument):
        if event == "line":
            lines.append(frame.f_lineno)
            sys.settrace(None)  # a Python handler of the second signal
            ranks._pass_on(signal.SIGTERM, None)
            sys.settrace(interrupt)
        return interrupt

    def handle():
        sys.settrace(interrupt)
        ranks._pass_on(signal.SIGHUP, None)
        sys.settrace(None)

    handler = threading.Thread(target=handle, daemon=True)
    handler.start()
    handler.join(timeout=5)
    assert not handler.is_alive(), "it waits for itself"
    assert len(lines) > 3
    assert ranks.ends_within(0)


def test_a_signal_in_a_pause_ends_it(play, monkeypatch):
    monkeypatch.setattr(LaunchedRanks, "ends_within", lambda self, s: os.kill(os.getpid(), signal.SIGTERM) or True)
    code, said, _ = play([start(5, 1, 4), DONE])
    assert code == 75
    assert said.splitlines()[-1] == "train.py: a signal ended the run after step 5: the same command continues"


def test_minutes_are_those_of_all_starts_together(play, tmp_path):
    starts = [start(5, 1, 4, wait=1.5), start(7, 1, 6, wait=1.5), DONE]
    assert play(starts, minutes=2.0)[0] == 0
    words = [json.loads(line) for line in (tmp_path / "words").read_text().splitlines()]
    assert {tuple(each[-2:-1]) for each in words} == {("--minutes",)}
    left = [60 * float(each[-1]) for each in words]
    assert 118 < left[0] <= 120
    assert left[0] - left[1] >= 1.5
    assert left[1] - left[2] >= 1.5


def test_a_signal_before_the_ranks_are_there_reaches_them(play, tmp_path, monkeypatch):
    """As one that comes while srun's nodes are looked at."""
    monkeypatch.setattr(module, "without_lost_nodes", lambda launcher: os.kill(os.getpid(), signal.SIGTERM) or [])
    begun = time.monotonic()
    code, said, _ = play([start(5, 0, 4, wait=20), DONE])
    assert time.monotonic() - begun < 15
    assert code != 0
    assert "a signal ended the run" in said


def test_what_it_needs_is_said():
    assert misused("mpirun -n 2", "run", {}) is None
    assert misused("mpirun -n 2", "run", {"SLURM_PROCID": "0"}) is None, "a batch script's own process"
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        assert misused("mpirun", "run", {name: "0"}).startswith("--restarts under a launcher, expected without")
    assert "add --launcher 'mpirun -n 4'" in misused(None, "run", {})
    assert "add --out RUN" in misused("mpirun", None, {})
    assert "add --launcher 'mpirun -n 4'" in misused(" ", "run", {})
    assert misused("mpirun -n '4", "run", {}).startswith("--launcher mpirun -n '4: No closing quotation, expected")


@pytest.mark.parametrize(("flag", "value"), [("--restarts", "-1"), ("--restart-after", "nan"), ("--minutes", "-3")])
def test_numbers_are_checked_before_anything_starts(monkeypatch, capsys, flag, value):
    words = ["--restarts", "2", "--launcher", "mpirun -n 2", "--out", "RUN", flag, value]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.setattr(train, "supervise", lambda *arguments: pytest.fail("it has started"))
    with pytest.raises(SystemExit) as caught:
        train.main()
    assert caught.value.code == 2
    assert f"error: {flag} is " in capsys.readouterr().err


def test_it_gets_the_settings(monkeypatch):
    words = ["--restarts", "2", "--launcher", "mpirun -n 2", "--out", "RUN", "--restart-after", "7", "--minutes", "8"]
    given = []
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.setattr(train, "supervise", lambda *arguments: given.extend(arguments) or 0)
    with pytest.raises(SystemExit):
        train.main()
    assert given == [2, "mpirun -n 2", "RUN", 7.0, 8.0, words]


def test_the_ranks_do_not_get_its_flags():
    words = ["--steps", "3", "--restarts=5", "--launcher", "srun -n 2", "--restarts", "2", "--out", "run"]
    assert without_own_flags(words) == ["--steps", "3", "--out", "run"]


def test_srun_leaves_out_nodes_that_slurm_has_lost(tmp_path, monkeypatch):
    sinfo, by_state = tmp_path / "sinfo", ""
    for state in ("drain", "fail"):  # of a node that is not to have new jobs, and still works for those that it has
        by_state += f"case $* in *{state}*) echo {state};; esac\n"
    sinfo.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{by_state}echo cn07\necho cn03\necho cn07\n')
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert without_lost_nodes("srun") == []
    monkeypatch.setenv("SLURM_JOB_NODELIST", "cn[01-07]")
    assert without_lost_nodes("/usr/bin/srun") == ["--exclude=cn03,cn07", "--overlap"]
    assert "--nodes=cn[01-07]" in (tmp_path / "words").read_text()
    assert without_lost_nodes("mpirun") == []


def test_progress_is_read_from_whole_lines(tmp_path):
    assert (last_step(tmp_path), newest_step(tmp_path)) == (0, 0)
    (tmp_path / "config.json").write_text('{"resumed_step": null}')
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert last_step(tmp_path) == 2
    (tmp_path / "log.jsonl").write_text('{"ste')
    assert last_step(tmp_path) == 0
    assert newest_step(tmp_path / ("x" * 300)) == 0, "a name that the file system refuses"


def test_a_start_that_stands_still_is_ended_with_all_its_processes_and_is_a_failed_one(play, tmp_path, monkeypatch):
    monkeypatch.setattr(launched_ranks, "LOOK_S", 0.05)
    monkeypatch.setattr(launched_ranks, "TO_END_S", 0.3)
    code, said, pauses = play([start(5, 0, 4, wait=200, deaf=True), DONE], limit_s=1.5)
    assert (code, pauses) == (0, [5])
    assert re.search(rf"this start has written nothing to {tmp_path}/run for [12] s \(--restart-after\): it is", said)
    assert "ended with code 124 after step 5: they start again in 5 s, from the checkpoint of step 4" in said
    assert wait_until(lambda: is_zombie(int((tmp_path / "rank").read_text())), 5), (
        "it would write beside the next ranks"
    )


def test_a_start_that_ends_on_the_way_is_none_that_a_signal_ended(play, tmp_path, monkeypatch):
    """Ranks that answer the SIGTERM by a checkpoint: exit code 75."""
    monkeypatch.setattr(launched_ranks, "LOOK_S", 0.05)
    code, said, _ = play([start(5, 0, 4, wait=20), DONE], limit_s=1.5)
    assert (code, (tmp_path / "signals").read_text()) == (0, "SIGTERM\n")
    assert "ended with code 124" in said


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints" / "step-00000008.part").mkdir(parents=True)
    (tmp_path / "log.jsonl").write_text("{}\n")
    (tmp_path / LOCK).write_bytes(own_lock().content())
    return tmp_path


@pytest.mark.parametrize(
    "written", ["log.jsonl", "config.json", "checkpoints/step-00000008.part/rank-00001.safetensors"]
)
def test_what_a_run_writes_is_a_sign_that_it_moves_on(run, written):
    signs = SignsOfLife(run, 100)
    for look in range(30):
        assert signs.why_over(60) is None
        (run / written).write_text("." * look)
        assert signs.why_over(60) is None
    assert signs.why_over(60) is None
    assert "has written nothing" in signs.why_over(60)


def test_rank_0_s_life_is_none_but_the_lack_of_it_says_that_the_ranks_are_gone(run):
    beating, silent = SignsOfLife(run, 3 * GONE_S), SignsOfLife(run, 3 * GONE_S)
    assert [silent.why_over(GONE_S) for _ in range(2)] == [None] * 2, "the lock is an earlier start's"
    for beat in range(2):
        os.utime(run / LOCK, (beat, beat))
        assert beating.why_over(GONE_S) is None
    os.utime(run / LOCK, (9, 9))
    assert "has written nothing" in beating.why_over(GONE_S)
    gone = SignsOfLife(run, 3 * GONE_S)
    (run / LOCK).unlink()
    assert gone.why_over(GONE_S) is None
    assert "rank 0's last sign of life" in gone.why_over(GONE_S)


def test_no_limit_and_a_file_system_with_a_fault_end_nothing(run, monkeypatch):
    def fail(path):
        raise UserError(f"{path}: Input/output error")

    never, signs = SignsOfLife(run, 0), SignsOfLife(run, 10)
    os.utime(run / LOCK, (1, 1))
    assert [never.why_over(1e9) for _ in range(3)] == [None] * 3
    with monkeypatch.context() as patch:
        patch.setattr(launched_ranks, "look", fail)
        assert [signs.why_over(1e9) for _ in range(3)] == [None] * 3
    assert signs.why_over(5) is None
    assert signs.why_over(10) is not None
