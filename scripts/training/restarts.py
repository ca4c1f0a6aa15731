"""--restarts K: train.py starts the ranks itself, and starts them again if they fail.

    python scripts/train.py --restarts 5 --launcher "mpirun -n 4" --out RUN --checkpoint-minutes 10 ...

Each start resumes from the newest checkpoint (--resume). If a start hangs, its own ranks (--end-on-stall) or this
process (launched_ranks.py) end it. There is no further start

- when all steps are done, when a signal asked for the end, after a user's mistake (exit code 2), after K restarts;
- when a start fails at the same step as the last start that made a step, with no checkpoint in between: another start
  would fail there again;
- when two consecutive starts make no step and the run has never made one. If the run has made steps, a host may be
  unreachable for a while, so the starts go on.

Pauses between starts begin at FIRST_PAUSE_S and double until a start leaves a checkpoint. --minutes limits all starts
together: each start gets the minutes that are left. Each start adds a line to RUN/restarts.jsonl (docs/formats.md).

Ranks of an earlier start may still run where no launcher can reach them, such as behind a cut cable. So the next start
takes over the run's lock: the lock holds this process's number (--supervisor), which all its starts share.

This process does not use MPI. It forwards signals in the form that the launcher passes on to its ranks.
"""

import json
import os
import shlex
import sys
import time
import uuid
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dist.console import BY_CTRL_C, USER_MISTAKE, say
from dist.probe.programs import RANKS, is_first, tool_output
from dist.world import end_without_mpi
from gpt2.formats.checkpoints import newest_first
from scripts.training.launched_ranks import CONFIG, LOG, SUMMARY, LaunchedRanks
from scripts.training.signals import INTERRUPTED, Clock

TRAIN = Path(__file__).parents[1] / "train.py"
OWN_FLAGS = "--restarts", "--launcher"  # the ranks do not get these
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
LINE_BYTES = 1 << 16  # a line of log.jsonl is shorter
ASKED = INTERRUPTED, BY_CTRL_C  # exit codes of a run that a signal has ended
GOES_ON = "the same command continues"
# States of SLURM's nodes. A draining node still runs steps of its jobs, so it is not left out.
NOT_THERE = "down,no_respond"


class StartResult(NamedTuple):
    """The last step of a start and the step of the newest complete checkpoint; each is 0 if there is none."""

    step: int
    checkpoint: int

    def when(self) -> str:
        return f"after step {self.step}" if self.step else "before its first step"


def supervise(
    restarts: int, launcher: str | None, out: str | None, limit_s: float, minutes: float, words: list[str]
) -> int:
    """Start the ranks until the run is over. Return the exit code.

    launcher, out: the flags, None if missing. limit_s: --restart-after. minutes: 0 for no limit. words: this process's
    command line.
    """
    if problem := misused(launcher, out, os.environ):
        end_without_mpi(problem, is_first(RANKS))
    folder = Path(out)
    program, *options = shlex.split(launcher)
    clock = Clock(0.0, minutes)
    flags = "--resume", "--end-on-stall", f"--supervisor={uuid.uuid4().hex}"
    command = [*options, sys.executable, str(TRAIN), *without_own_flags(words), *flags]
    ranks = LaunchedRanks(program, folder, limit_s)
    earlier = []
    pause_s = FIRST_PAUSE_S
    for left in reversed(range(restarts + 1)):
        begun = time.time()
        newest = newest_step(folder)
        summary = written_at(folder, SUMMARY)
        log = written_at(folder, LOG)
        code = ranks.run([program, *without_lost_nodes(program), *command, *minutes_left(clock)])
        is_done = code == 0 and written_at(folder, SUMMARY) != summary
        after = StartResult(last_step(folder) if written_at(folder, LOG) != log else 0, newest_step(folder))
        pause_s = FIRST_PAUSE_S if after.checkpoint > newest else pause_s
        is_late = minutes > 0 and clock.left_s() <= pause_s
        why = why_it_ends(code, is_done, ranks.has_ended, earlier, after, left, is_late)
        keep(folder, {"began": begun, "ended": time.time(), "code": code, **after._asdict(), "ends": why})
        if why is not None:
            say(f"train.py: {why}")
            return code if is_done or code else INTERRUPTED if ranks.has_ended else 1
        where = f"the checkpoint of step {after.checkpoint}" if after.checkpoint else "the beginning"
        ended = f"the ranks ended with code {code} {after.when()}"
        say(f"train.py: {ended}: they start again in {pause_s:.0f} s, from {where}")
        if ranks.ends_within(pause_s):
            say(f"train.py: a signal ended the run {after.when()}: {GOES_ON}")
            return INTERRUPTED
        earlier.append(after)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError("the last start always ends it")


def misused(launcher: str | None, out: str | None, environment) -> str | None:
    """Return in one line what is wrong with the flags or the environment, or None."""
    if any(name in environment for name in RANKS[:3]) or "SLURM_STEP_ID" in environment:
        return "--restarts under a launcher, expected without: it starts the ranks itself, by --launcher"
    try:
        starts = shlex.split(launcher or "")
    except ValueError as error:
        return f"--launcher {launcher}: {error}, expected words as a shell takes them: check its quotes"
    for flag, value, example in (("--out", out, "RUN"), ("--launcher", starts, "'mpirun -n 4'")):
        if not value:
            return f"--restarts without {flag}, expected both: add {flag} {example}"
    return None


def why_it_ends(
    code: int, is_done: bool, was_asked: bool, earlier: list[StartResult], after: StartResult, left: int, is_late: bool
) -> str | None:
    """Return why no further start follows one that ended with this exit code; None if one follows.

    is_done: the start has written or touched summary.json. was_asked: a signal requested the end. earlier, after: the
    results of earlier starts, and of this one. left: remaining restarts. is_late: --minutes end before another start.
    """
    if is_done:
        return "the run has ended well"
    if was_asked or code in ASKED:
        return f"a signal ended the run {after.when()}: {GOES_ON}"
    if code == USER_MISTAKE:
        return "no restart after exit code 2, which means a mistake in the command: see the error above"
    # Only starts that made a step are compared: a start without one does not show where steps fail.
    alike = [each for each in earlier if each.step]
    if not after.step:  # if the run has made steps before, a host or the network is down and may come back
        alike = earlier if not alike and not after.checkpoint else []
    if alike[-1:] == [after]:
        return f"the run has failed twice {after.when()}, with no checkpoint in between: look there, no restart helps"
    if is_late:
        return f"the run has failed {after.when()}, and --minutes end before another start: {GOES_ON}"
    if not left:
        return f"the run has failed {after.when()}, and no restarts are left: raise --restarts"
    return None


def without_own_flags(words: list[str]) -> list[str]:
    """Return the words of a command line without OWN_FLAGS and their values."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in OWN_FLAGS:
        parser.add_argument(flag)
    return parser.parse_known_args(words)[1]


def minutes_left(clock: Clock) -> list[str]:
    """Return the flag for the remaining --minutes, which overrides the user's flag; [] without a limit."""
    left_s = clock.left_s()
    return [] if left_s is None else ["--minutes", f"{max(left_s, 1.0) / 60:.6g}"]  # 0 would be no limit


def newest_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none, or on an error of the file system."""
    with suppress(OSError):
        for path in newest_first(folder / "checkpoints"):
            return int(path.name.removeprefix("step-"))
    return 0


def last_step(folder: Path) -> int:
    """Return the step of the last whole line of log.jsonl, if the newest start wrote it; else 0."""
    with suppress(OSError, ValueError, KeyError, TypeError), open(folder / LOG, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LINE_BYTES))
        step = json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])["step"]
        resumed = json.loads((folder / CONFIG).read_bytes())["resumed_step"] or 0
        return step if step > resumed else 0
    return 0


def written_at(folder: Path, name: str) -> int | None:
    """Return when a file of the run was last written, in nanoseconds; None if there is no such file."""
    with suppress(OSError):
        return (folder / name).stat().st_mtime_ns
    return None


def keep(folder: Path, start: dict) -> None:
    """Add a line to restarts.jsonl. A full disk or a missing folder is ignored."""
    with suppress(OSError), open(folder / "restarts.jsonl", "a") as file:
        file.write(json.dumps(start) + "\n")


def without_lost_nodes(launcher: str) -> list[str]:
    """Return srun's flags that exclude nodes that SLURM has lost, so that spare nodes of the allocation replace them.

    srun --overlap is needed because SLURM holds the cores of the failed step for minutes.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if Path(launcher).name != "srun" or not nodes:
        return []
    flags = "--noheader", "--Node", f"--nodes={nodes}", f"--states={NOT_THERE}", "--format=%N"
    lost = sorted({*(tool_output("sinfo", *flags) or "").split()})
    return [f"--exclude={','.join(lost)}", "--overlap"] if lost else []
