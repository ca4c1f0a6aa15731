"""scripts/watch.py by written run folders: whether a run lives, what is left, stalls, and what stands on the screen."""

import io
import json
import os
import shutil
import sys
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec

import numpy as np
import pytest

from dist.watch.live import POSITION
from scripts import watch
from scripts.reports.verdict import diagnose
from scripts.training.lock_file import own_lock
from scripts.watching.bars import ASCII, BLOCKS, glyphs_for
from scripts.watching.run_state import ENDED, FINISHED, STALLED, STARTING, TRAINING, Watcher
from tests.support import faulty_runs
from traces import RunError, read_run
from traces.read.run_files import read_config, read_log
from traces.record.phases import PHASES
from traces.units import seconds_text

pytestmark = pytest.mark.any_mpi
needs_rich = pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed: pip install rich")
STARTED = 1_750_000_000
STEPS = 24  # of the run that is written; it is to have 60


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return faulty_runs.make(tmp_path_factory.mktemp("made"), steps=STEPS, slow={5: 1.6}).path


@pytest.fixture
def folder(tmp_path, made):
    """A run of nine ranks on five nodes that trains: its first step began 10 s after the job, the last one ended 58 s
    after that. Rank 5 is slow."""
    path = shutil.copytree(made, tmp_path / "run")
    change(path, started=moment(0), steps=60)
    rewrite_log(path, [row | {"elapsed_s": 10 + 58 * row["step"] / STEPS} for row in read_log(path)])
    write_lock(path, -1)
    set_times(path)
    return path


def moment(after):
    return datetime.fromtimestamp(STARTED + after).astimezone().isoformat()


def change(path, steps=None, **facts):
    config = read_config(path) | facts
    config["settings"] |= {"steps": steps} if steps else {}
    (path / "config.json").write_text(json.dumps(config))


def rewrite_log(path, rows):
    (path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_lock(path, started, **facts):
    (path / "lock.json").write_bytes(replace(own_lock(), started=moment(started), **facts).content())


def set_times(path, log=68, lock=69):
    """Seconds after the job's start, at which these files were written last."""
    for name, after in (("config.json", 10), ("log.jsonl", log), ("lock.json", lock)):
        os.utime(path / name, (STARTED + after,) * 2)


@pytest.fixture(autouse=True)
def now(monkeypatch):
    monkeypatch.setattr("time.time", lambda: STARTED + 71.0)


def test_a_run_that_trains(folder):
    state = Watcher(folder).look()
    assert (state.word, state.stall) == (TRAINING, "")
    assert state.elapsed_s == 69
    assert state.remaining_s == pytest.approx((60 - STEPS) * 58 / STEPS)
    assert state.answer == diagnose(read_run(folder)), "one verdict, however it is asked for"


def test_a_run_that_went_on(folder):
    """Of the log only the steps of this start have taken its time."""
    rows = read_log(folder)
    for row in rows[:12]:
        row |= {"elapsed_s": 100 * row["elapsed_s"], "step_s": 1000.0, "tokens_per_s": 1.0}
    for row in rows[12:14]:
        row["step_s"] = 500.0  # the first steps compile
    rewrite_log(folder, rows)
    change(folder, resumed_step=12)
    set_times(folder)
    state = Watcher(folder).look()
    assert (state.elapsed_s, state.remaining_s) == (69, pytest.approx((60 - STEPS) * 58 / STEPS))
    rates = [row["tokens_per_s"] for row in rows[12:]]
    assert f"  {np.median(rates[-20:]):,.0f} tokens/s" in shown(state)[2]
    change(folder, resumed_step=STEPS)
    set_times(folder)
    state = Watcher(folder).look()
    assert (state.word, state.remaining_s) == (STARTING, None)


def test_a_run_that_is_being_taken_up_again_has_not_stalled(folder):
    """Its job has the lock, and prepares; config.json and log are those of the start before, an hour old."""
    write_lock(folder, 60)
    set_times(folder, log=-3600, lock=70)
    state = Watcher(folder).look()
    assert (state.word, state.stall, state.elapsed_s, state.remaining_s) == (STARTING, "", 10, None)


def test_a_stall_is_seen_by_the_files_own_clock(folder, monkeypatch):
    monkeypatch.setattr("time.time", lambda: STARTED + 99.0)
    step_s = np.median([row["step_s"] for row in read_run(folder).log])
    limit_s = 10 + 10 * step_s
    set_times(folder, log=68, lock=68 + limit_s + 1)
    state = Watcher(folder).look()
    assert state.word == STALLED
    assert state.stall.startswith(f"no step for {limit_s + 1:.0f} s, where one takes {seconds_text(step_s)}")
    set_times(folder, log=68, lock=68 + limit_s - 1)
    assert Watcher(folder).look().word == TRAINING, "a validation may take a while"


def test_runs_that_are_over(folder):
    set_times(folder, lock=40)
    assert Watcher(folder).look().word == ENDED, "its lock is silent for longer than 20 s"
    (folder / "lock.json").unlink()
    assert Watcher(folder).look().word == ENDED
    (folder / "summary.json").write_text("{}")
    assert Watcher(folder).look().word == ENDED, "a signal ended it"
    change(folder, steps=STEPS)
    state = Watcher(folder).look()
    assert (state.word, state.remaining_s) == (FINISHED, None)
    (folder / "summary.json").unlink()
    assert Watcher(folder).look().word == ENDED, "it was killed behind its last step, before its last checkpoint"


@needs_rich
def test_a_program_that_does_not_say_how_many_steps_it_makes(folder):
    settings = read_config(folder)["settings"]
    del settings["steps"]
    change(folder, settings=settings)
    set_times(folder)
    state = Watcher(folder).look()
    assert (state.word, state.remaining_s) == (TRAINING, None)
    assert shown(state)[1] == f"step {STEPS}, 1:09 elapsed"
    (folder / "lock.json").unlink()
    assert Watcher(folder).look().word == ENDED
    (folder / "summary.json").write_text('{"steps": 24}')
    assert Watcher(folder).look().word == FINISHED
    (folder / "log.jsonl").write_text("")
    assert Watcher(folder).look().word == ENDED, "it has made no step"


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_lock_that_moves_lives_whatever_the_clocks_say(folder, monkeypatch, clock):
    monkeypatch.setattr("time.time", lambda: STARTED + 9999.0)
    watcher = Watcher(folder)
    assert watcher.look().word == ENDED
    set_times(folder, lock=70)
    assert watcher.look().word == TRAINING
    clock[0] += 30
    assert watcher.look().word == ENDED


def test_a_lock_of_a_dead_job_does_not_live_as_a_server_s_clock_is_ahead(folder, clock):
    """It stays as it is for longer than a lock that is held ever does."""
    set_times(folder, log=7199, lock=7200)
    watcher = Watcher(folder)
    assert watcher.look().word == TRAINING, "nobody knows yet"
    clock[0] = 21.0
    assert watcher.look().word == ENDED


def test_a_job_has_not_begun_after_its_last_sign_of_life(folder):
    """The one by its host's clock, the other by the file system's, which is behind."""
    (folder / "log.jsonl").write_text("")
    write_lock(folder, 65)
    set_times(folder, log=-100, lock=60)
    assert Watcher(folder).look().elapsed_s == 0


def test_a_copied_folder_says_what_the_run_has_recorded(folder, monkeypatch):
    """All its files are new, and this machine's clock is a day later. The holder of its lock has ended."""
    monkeypatch.setattr("time.time", lambda: STARTED + 86400.0)
    write_lock(folder, -1, born=1)
    for path in folder.rglob("*"):
        os.utime(path, (STARTED + 86400,) * 2)
    state = Watcher(folder).look()
    assert (state.word, state.elapsed_s) == (ENDED, 68)
    change(folder, steps=STEPS)
    (folder / "lock.json").unlink()
    (folder / "summary.json").write_text("{}")
    state = Watcher(folder).look()
    assert (state.word, state.elapsed_s) == (FINISHED, 68)


@needs_rich
def test_what_is_not_there_yet(folder, tmp_path):
    with pytest.raises(RunError, match="not a folder"):
        Watcher(tmp_path / "none").look()
    for path in (folder / "traces").iterdir():
        path.unlink()
    assert Watcher(folder).look().unmeasured == "no traces yet"
    change(folder, settings=read_config(folder)["settings"] | {"trace": "off"})
    assert "--trace off" in Watcher(folder).look().unmeasured
    (folder / "config.json").unlink()
    (folder / "log.jsonl").unlink()
    os.utime(folder / "lock.json", (STARTED + 70,) * 2)
    state = Watcher(folder).look()
    assert (state.word, state.log, state.elapsed_s) == (STARTING, [], 71)
    assert shown(state)[0].endswith("STARTING")
    (folder / "lock.json").unlink()
    with pytest.raises(RunError, match=r"config\.json is missing"):
        Watcher(folder).look()


def test_traces_are_read_anew_only_where_something_was_written(folder):
    watcher = Watcher(folder)
    first = watcher.look()
    assert watcher.look().measured is first.measured
    os.utime(next((folder / "traces").glob("rank-00003.trace")))
    assert watcher.look().measured is not first.measured


def test_who_holds_the_others_up(folder, clock):
    """Rank 5's pulse stands still, all others wait in an exchange: named after a while, not at the first look."""
    set_times(folder, log=50, lock=70)
    nodes, watcher, stalls = faulty_runs.NODES, Watcher(folder), []
    for look in range(5):
        for node in set(nodes):
            rows = [
                (7, rank, 100 + rank, 1 if rank == 5 else look, 40, 25, 1, PHASES.index("allreduce") + 1, 0, 0, 0, 0)
                for rank, its in enumerate(nodes) if its == node
            ]  # fmt: skip
            (folder / "traces" / f"node-{node:05d}.live").write_bytes(np.array(rows, POSITION).tobytes() + b"half")
        stalls.append(watcher.look().stall)
        clock[0] += 4
    assert stalls[0].startswith("no step for 20 s")
    assert stalls[-1].startswith("rank 5 on cn03 shows no sign of life, last seen in allreduce of step 25")
    assert "no step for 20 s" in stalls[-1]


# --- the screen ---


def shown(state, columns=80, lines=24, glyphs=BLOCKS) -> list[str]:
    from rich.console import Console

    from scripts.watching.screen import screen

    console = Console(width=columns, height=lines, file=io.StringIO(), highlight=False, markup=False)
    console.print(screen(state, columns, lines, glyphs))
    return console.file.getvalue().splitlines()


@needs_rich
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50), (132, 30), (60, 15), (20, 5), (7, 3), (1, 1)])
def test_all_fits_on_the_screen(folder, columns, lines):
    set_times(folder, log=40, lock=70)  # with a stall
    text = shown(Watcher(folder).look(), columns, lines)
    assert len(text) <= lines
    assert max(map(len, text)) <= columns


@needs_rich
def test_what_a_stranger_sees(folder):
    from scripts.watching.screen import rank_rows

    state = Watcher(folder).look()
    text = shown(state)
    assert len(text) == 24
    assert text[0].endswith("TRAINING")
    assert "hierarchical, 9 ranks on 5 nodes" in text[0]
    assert text[1].startswith("step 24/60 ")
    assert text[1].endswith(" 40%  1:09 elapsed, about 1:27 left")
    assert any(line.startswith("verdict so far, by steps 3 to 24: straggler: rank 5 on") for line in text)
    assert any(line.startswith(f"loss {state.log[-1]['loss']:.4f} after step 24, validation ") for line in text)
    (slow,) = [line for line in text if "SLOWEST" in line]
    assert slow.startswith("rank 5 cn03")
    assert any(" of 9 ranks " in line for line in text)
    shown_ranks = [int(line.split()[1]) for line in text if line.startswith("rank ")]
    longest = np.argsort([-row.parts[0] for row in rank_rows(state)])[: len(shown_ranks)]
    assert shown_ranks == sorted(longest.tolist()), "of more than have room those that compute longest"
    assert any(" in " in line and " out " in line and "%" in line for line in text), "a port"
    text = shown(state, 200, 50)
    assert [line.split()[1] for line in text if line.startswith("rank ")][1:] == [*map(str, range(9))]
    assert sum("in " in line and "out " in line and "%" in line for line in text) >= 5


@needs_rich
def test_the_bars_are_the_milliseconds(folder):
    from scripts.watching.screen import rank_rows

    state = Watcher(folder).look()
    rows, seconds = rank_rows(state), state.measured.times.seconds
    np.testing.assert_allclose(
        [row.parts[0] for row in rows],
        1e3 * np.median(state.measured.times.phase("forward", "backward", "update"), axis=0),
    )
    steps = 1e3 * np.median(seconds[:, :, -1], axis=0)
    assert [sum(row.parts) for row in rows] == pytest.approx(steps.tolist(), rel=0.1)


@needs_rich
def test_a_terminal_without_blocks(folder):
    assert glyphs_for("utf-8") is BLOCKS
    assert [glyphs_for(name) for name in ("ascii", "latin-1", None, "no such")] == [ASCII] * 4
    "\n".join(shown(Watcher(folder).look(), glyphs=ASCII)).encode("ascii")


def test_stacked_bars_end_where_their_sums_do():
    assert BLOCKS.stacked((1, 1, 1, 1), 4, 8) == "██▒▒··--"
    assert BLOCKS.stacked((0.4, 0.4, 0.4, 0.4), 4, 10) == "█▒·-      "
    assert BLOCKS.bar(0.5, 10) == "█████░░░░░"
    assert BLOCKS.bar(1.2, 4) == "████"


# --- the command ---


@needs_rich
def test_one_screen_for_a_pipe_and_mistakes_in_one_line(folder, capsys, monkeypatch):
    assert watch.main([str(folder), "--once"]) == 0
    assert "step 24/60" in capsys.readouterr().out
    for flags, says in ((["none", "--once"], "not a folder"), ([str(folder)], "use --once")):
        assert watch.main(flags) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert watch.main([str(folder), "--once"]) == 2
    assert "pip install -e '.[watch]'" in capsys.readouterr().err
