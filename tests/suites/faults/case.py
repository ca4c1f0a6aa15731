"""A case of failure_suite.py's runs: what happens, where, and what is to become of the run."""

import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.suites.faults.launchers import NODES, Cluster
from tests.suites.faults.processes import launcher_process, rank_processes, send

VICTIM = 1
FAULT_STEP = 35
IN_RANK = f"{VICTIM}:{FAULT_STEP}"
# Ends before its last step; makes all its steps and ends well; makes all of them, and then says what is wrong.
ENDS, GOES_ON, TO_THE_END = "ends", "goes on", "goes on to the end"
MISTAKE, INTERRUPTED = 2, 75  # exit codes
ERROR = r"^(\w+\.py: )?error: "


class Scene:
    """Where it happens: a run folder, the hosts whose ranks train into it, and what each rank runs to go on with it.

    second: what became of another job that a case has started: {"ended", "seconds", "code", "message"}.
    """

    def __init__(self, run: Path, cluster: Cluster, command: list[str], ranks_count: int):
        self.run, self.cluster, self.command, self.ranks_count = run, cluster, command, ranks_count
        self.second = None

    def ranks(self) -> dict[int, int]:
        return rank_processes(self.run)

    def signal_ranks(self, number: int, *ranks: int) -> None:
        pids = self.ranks()
        send(number, *(pids.get(rank) for rank in ranks or pids))

    def signal_launcher(self, number: int) -> None:
        send(number, launcher_process(self.run))

    def on_victim(self, *command: object) -> None:
        """Run a command on the victim's host, in its view of the file systems."""
        subprocess.run(self.cluster.nodes[VICTIM].enter(*map(str, command)), check=True)

    def data(self) -> Path:
        return data_folder(self.run)


def data_folder(run: Path) -> Path:
    """Where the shards are that a run reads whose flags name {data}."""
    return run.with_suffix(".data")


def nothing(_) -> None:
    pass


def all_is_well(_) -> list[str]:
    return []


@dataclass(frozen=True)
class Case:
    """says: what happens. before(scene): do it to the hosts, before the job starts. provoke(scene): do it to a run that
    has made FAULT_STEP steps, or, at_start, as soon as its ranks are there. inside: the fault of failure_train.py.

    expected: ENDS, GOES_ON or TO_THE_END; with the exit code, None for any but 0, and a line of the job that matches
    `line`, within_s after the cause. by_launcher: when and how it ends is the launcher's choice. second: the exit code
    of another job that `provoke` starts, and `line` is for that one. resumed: the exit code when it is taken up; told
    to take the run over, if take_over.

    strategy: and other flags of a run that nobody disturbs, too; {data} in them is a folder of shards. flags: besides.
    ranks: one on each of the first hosts. supervised: train.py --restarts starts them, under mpirun alone; limit_s: to
    the end of the job. command: before Python. disk: the folder of the run, "." or "checkpoints",
    that is a file system of its own. heal(run): make it possible to go on. afterwards(run): what else happens before it
    is resumed. check(run): in words, what is not as it should be in the folder at the end.
    """

    says: str
    expected: str = ENDS
    provoke: Callable[[Scene], None] = nothing
    inside: str | None = None
    flags: tuple = ()
    strategy: tuple = ("reduce-scatter",)
    ranks: int = NODES
    supervised: bool = False
    limit_s: float = 60
    command: tuple[str, ...] = ()
    disk: str | None = None
    before: Callable[[Scene], None] = nothing
    at_start: bool = False
    afterwards: Callable[[Path], None] = nothing
    heal: Callable[[Path], None] = nothing
    check: Callable[[Path], list[str]] = all_is_well
    code: int | None = None
    within_s: float = 5
    line: str = ""
    by_launcher: bool = False
    second: int | None = None
    resumed: int = 0
    take_over: bool = True


def stop_ranks(scene: Scene) -> list[int]:
    """Stop all of them; returns their process IDs, for `send(SIGCONT, ...)`."""
    pids = [*scene.ranks().values()]
    send(signal.SIGSTOP, *pids)
    return pids
