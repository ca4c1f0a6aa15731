"""What goes wrong in the runs of failure_suite.py, and how: from outside the job wherever it can be."""

import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt2.formats.checkpoints import newest_first, rank_file
from tests.suites.faults.launchers import Cluster
from tests.suites.faults.log import newest_step
from tests.suites.faults.processes import launcher_process, rank_processes, send, wait_until

VICTIM = 1
FAULT_STEP = 35
# Root may write everywhere; without these it is held back by a folder's permissions, as everybody else.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--")
ENDS, GOES_ON = "ends", "goes on"


class Scene:
    """Where it happens: a run folder, and the hosts whose ranks train into it."""

    def __init__(self, run: Path, cluster: Cluster):
        self.run, self.cluster = run, cluster

    def signal_ranks(self, number: int, *ranks: int) -> None:
        pids = rank_processes(self.run)
        send(number, *(pids.get(rank) for rank in ranks or pids))

    def signal_launcher(self, number: int) -> None:
        send(number, launcher_process(self.run))


def nothing(_) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """says: what happens. expected: ENDS or GOES_ON. provoke(scene): do it, to a run that has made FAULT_STEP steps.

    inside: instead, the fault of failure_train.py. flags: of train.py, besides, and its strategy. command: before
    Python. disk: the folder of the run, "." or "checkpoints", that is a file system of its own. heal(run): make it
    possible to go on. afterwards(run): what else happens before it is resumed.
    """

    says: str
    expected: str = ENDS
    provoke: Callable[[Scene], None] = nothing
    inside: str | None = None
    flags: tuple = ()
    strategy: str = "reduce-scatter"
    command: tuple[str, ...] = ()
    disk: str | None = None
    afterwards: Callable[[Path], None] = nothing
    heal: Callable[[Path], None] = nothing


def kill_host(scene: Scene) -> None:
    """Its first process, and with it the kernel ends all others there."""
    send(signal.SIGKILL, scene.cluster.nodes[VICTIM].pid)


def fill(folder: Path) -> None:
    """The disk that a folder is on, to the last byte."""
    try:
        with open(folder / "ballast", "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError:
        pass


def fill_for_a_while(scene: Scene) -> None:
    """Until two checkpoints have failed."""
    folder = scene.run / "checkpoints"
    before = newest_step(scene.run)
    fill(folder)
    wait_until(lambda: False, 0.5)
    (folder / "ballast").unlink()
    assert newest_step(scene.run) <= before + 10


def empty(run: Path) -> None:
    (run / "ballast").unlink(missing_ok=True)


def forbid(scene: Scene) -> None:
    subprocess.run(["chmod", "-R", "a-w", scene.run], check=True)


def allow(run: Path) -> None:
    subprocess.run(["chmod", "-R", "u+w", run], check=True)


def damage(count: int, how: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A function that does that to the victim's file of a run's `count` newest checkpoints."""

    def change(run: Path) -> None:
        for checkpoint in newest_first(run / "checkpoints")[:count]:
            path = checkpoint / rank_file(VICTIM)
            path.write_bytes(how(path.read_bytes()))

    return change


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def killed(scene: Scene) -> None:
    scene.signal_ranks(signal.SIGKILL, VICTIM)


IN_RANK = f"{VICTIM}:{FAULT_STEP}"
CASES = {
    "killed": Case("a rank is killed (SIGKILL)", provoke=killed),
    "raises": Case("a rank raises an exception", inside=f"raise:{IN_RANK}"),
    "exits": Case("a rank leaves by `os._exit(3)`", inside=f"exit:{IN_RANK}"),
    "stopped": Case("a rank is stopped (SIGSTOP)",
                    provoke=lambda scene: scene.signal_ranks(signal.SIGSTOP, VICTIM)),
    "sleeps": Case("a rank hangs in Python", inside=f"sleep:{IN_RANK}"),
    "cable": Case("a host's cable is cut", provoke=lambda scene: scene.cluster.cut_cable(VICTIM)),
    "host": Case("a host dies", provoke=kill_host),
    "launcher": Case("the launcher is killed (SIGKILL)",
                     provoke=lambda scene: scene.signal_launcher(signal.SIGKILL)),
    "disk-checkpoints": Case("the disk of `checkpoints/` is full for half a second", GOES_ON, fill_for_a_while,
                             disk="checkpoints"),
    "disk-run": Case("the run folder's disk is full", provoke=lambda scene: fill(scene.run), disk=".", heal=empty),
    "read-only": Case("the run folder may not be written any more", GOES_ON, forbid, command=UNPRIVILEGED, heal=allow),
    "vanishes": Case("the run folder is removed", provoke=lambda scene: shutil.rmtree(scene.run, ignore_errors=True)),
    "corrupt": Case("a bit of the newest checkpoint is flipped", provoke=killed, afterwards=damage(1, flip)),
    "truncated": Case("a file of the newest checkpoint is cut", provoke=killed, afterwards=damage(1, truncate)),
    "all-damaged": Case("all checkpoints are damaged", provoke=killed, afterwards=damage(9, flip)),
    "nan": Case("the loss is no number", inside=f"nan:{IN_RANK}"),
    "overflow": Case("a rank's gradients are infinite, with `--skip-outliers 6`", GOES_ON, inside=f"overflow:{IN_RANK}",
                     flags=("--skip-outliers", 6)),
    "drift": Case("a rank's parameters differ, with `--check-replicas 10`", inside=f"drift:{IN_RANK}",
                  flags=("--check-replicas", 10), strategy="allreduce"),
    "usr1": Case("SIGUSR1 to one rank", GOES_ON, lambda scene: scene.signal_ranks(signal.SIGUSR1, VICTIM)),
    "usr1-launcher": Case("SIGUSR1 to the launcher", GOES_ON, lambda scene: scene.signal_launcher(signal.SIGUSR1)),
    "usr2": Case("SIGUSR2 to one rank", provoke=lambda scene: scene.signal_ranks(signal.SIGUSR2, VICTIM)),
    "usr2-launcher": Case("SIGUSR2 to the launcher", provoke=lambda scene: scene.signal_launcher(signal.SIGUSR2)),
    "term": Case("SIGTERM to all ranks", provoke=lambda scene: scene.signal_ranks(signal.SIGTERM)),
    "term-launcher": Case("SIGTERM to the launcher", provoke=lambda scene: scene.signal_launcher(signal.SIGTERM)),
}  # fmt: skip
