"""A training job seen from outside: its ranks' and its launcher's processes, found by the run folder that they name."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scripts.cluster.hosts import Host, command_line

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "srun")
# Which rank a process is, as its launcher has told it; srun's own word last, as an mpirun in a job inherits it.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
LOOK_S = 0.005


def rank_processes(folder: Path) -> dict[int, int]:
    """{rank: process ID} of the ranks that train into `folder` and are alive."""
    pids = [pid for pid in processes_of(folder) if is_python(program_of(pid))]
    # A rank that has just forked, as for git, is two of them for a moment: the first one is meant.
    found = dict(sorted(((rank, pid) for pid in pids if (rank := rank_of(pid)) is not None), reverse=True))
    return dict(sorted(found.items()))


def launcher_process(folder: Path) -> int | None:
    """The mpirun or srun that started them; of an srun that has forked, the first."""
    pids = [pid for pid in processes_of(folder) if Path(program_of(pid)).name in LAUNCHERS]
    return min(pids, default=None)


def program_of(pid: int) -> str:
    """The first word of its command line; "" if it has ended meanwhile."""
    return next(iter(command_line(pid)), "")


def processes_of(folder: Path) -> list[int]:
    """Those whose command line has `folder` as a word, and that are no zombies."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in numbers if str(folder) in command_line(pid)[1:] and not is_zombie(pid)]


def processes_on(host: Host) -> list[int]:
    """Those in a host's PID namespace, but for its first one, with which it would end."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in numbers if pid != host.pid and namespace_of(pid) == namespace_of(host.pid)]


def namespace_of(pid: int) -> str | None:
    with suppress(OSError):  # ended meanwhile
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


def is_python(program: str) -> bool:
    return Path(program).name.startswith("python")


def is_loaded(pid: int, library: str) -> bool:
    """Whether a process has mapped a file with that in its name, or has ended."""
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def rank_of(pid: int) -> int | None:
    """None of a process that is no rank, or has ended."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    return next((int(environment[name]) for name in RANK_VARIABLES if name in environment), None)


def send(number: int, *pids: int | None) -> None:
    """A signal to each process that is still there."""
    for pid in pids:
        try:
            if pid is not None:
                os.kill(pid, number)
        except ProcessLookupError:
            pass


def wait_until(holds: Callable[[], object], limit_s: float):
    """What `holds()` gives as soon as it is true; what it gave last if that has not come in time."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return found
