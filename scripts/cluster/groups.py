"""Limit CPU time and memory of virtual hosts by Linux control groups (cgroups), version 1 or 2.

    GROUP OF THIS PROCESS/virtual-cluster-PID-NUMBER/node0      in each controller's tree, or in the tree of version 2

The groups lie below this process's own group, so its limits hold for the hosts as well. A group outlives its processes,
even the process that made it. So a janitor reads a pipe from this process. However this process ends, the pipe closes,
and the janitor removes the groups as soon as the hosts are gone.
Files: the Linux kernel's Documentation/scheduler/sched-bwc.rst, admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

import os
import re
import secrets
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dist.control_groups import PLACES, VERSION_2, own_groups, text_of
from scripts.settings.units import UnitError, core_count, size_in_bytes
from traces.units import bytes_text

MARK = "virtual-cluster-"
# A host that has used its share pauses until the period ends: for 6 ms with 0.4 cores. With the kernel's default period
# of 100 ms it would pause for 60 ms, longer than a small model's microbatch. For periods below 10 ms the scheduler's
# tick, 1 to 4 ms, is too coarse.
PERIOD_US = 10_000
LEAST_QUOTA_US = 1_000  # the kernel's minimum
LEAST_MEMORY = 16_000_000  # bytes; with less the launcher's own processes do not start
FLAGS = {"cpu": "--cores-per-host", "memory": "--memory-per-host"}
# Only kernels with swap accounting have these files. Without them, the memory limit holds anyway or there is no swap.
OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.swap.max")
KILLS = ("memory.events", "memory.oom_control")  # version 2, version 1: a line like "oom_kill 1" counts kills
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit; shift; done; shift; exec "$@"'
JANITOR_LIMIT_S = 12
# Arguments: folders, innermost first. A group can be removed once its last process has ended.
JANITOR = """
cat > /dev/null
while true; do
    left=
    for folder; do rmdir "$folder" 2> /dev/null; [ -d "$folder" ] && left=1; done
    [ "$left" ] || exit 0
    sleep 0.1
done
"""


class ClusterError(Exception):
    """A cluster cannot run. The message says in one line what must change: the flags, or something on this machine."""


@dataclass(frozen=True)
class Limits:
    """Limits of each host. cores: CPU time, as a number of cores; memory: bytes. None: no limit."""

    cores: float | None = None
    memory: int | None = None

    @property
    def controllers(self) -> list[str]:
        return [name for name, limit in (("cpu", self.cores), ("memory", self.memory)) if limit is not None]


NO_LIMITS = Limits()


def read_limits(cores: str | None, memory: str | None) -> Limits:
    """Parse the limits of the flags, such as "0.4" and "600MB", or None. Raise UnitError for a wrong text."""
    limits = []
    for controller, read, text in (("cpu", core_count, cores), ("memory", host_memory, memory)):
        try:
            limits.append(None if text is None else read(text))
        except UnitError as error:
            raise UnitError(f"{FLAGS[controller]}: {error}") from None
    return Limits(*limits)


def host_memory(text: str) -> int:
    """Return 600000000 for "600MB"."""
    size = size_in_bytes(text)
    if size < LEAST_MEMORY:
        raise UnitError(f"{text[:40]!r} is not a memory limit: expected 16MB or more, such as 600MB or 2GiB")
    return size


@dataclass(frozen=True)
class ControlGroup:
    """The control groups of one host. folders: {controller: folder}; in version 2 both folders are the same."""

    name: str
    limits: Limits
    folders: dict[str, Path]

    @property
    def entrances(self) -> list[str]:
        """The files that move a process into the groups when it writes 0."""
        return [f"{folder}/cgroup.procs" for folder in dict.fromkeys(self.folders.values())]

    def joined(self, *command: str) -> list[str]:
        """Return the command that runs `command` in the groups."""
        return ["sh", "-c", JOIN, "sh", *self.entrances, "--", *command]


def kills_line(group: ControlGroup) -> str | None:
    """Return a line that says that a host's memory limit has killed processes; None if it has killed none."""
    for file in KILLS if "memory" in group.folders else ():
        counted = re.search(r"^oom_kill ([1-9]\d*)$", text_of(group.folders["memory"] / file), re.MULTILINE)
        if counted:
            ended = "a process" if counted[1] == "1" else f"{counted[1]} processes"
            limit = bytes_text(group.limits.memory)
            return f"host {group.name}: its limit of {limit} ended {ended} ({file}: {counted[0]})"
    return None


@contextmanager
def limited_groups(names: list[str], limits: Limits, places=PLACES):
    """Yield {host: ControlGroup}, {} without limits. Raise ClusterError if this machine refuses to make groups."""
    if not limits.controllers:
        yield {}
        return
    parents = {controller: parent_of(controller, limits, places) for controller in limits.controllers}
    own = f"{MARK}{os.getpid()}-{secrets.token_hex(4)}"
    tops = list(dict.fromkeys(parent / own for parent in parents.values()))
    with janitor([*(top / name for top in tops for name in names), *tops]):
        for top in tops:
            make_group(top)
        for controller, parent in parents.items():
            share_alike(parent / own, controller, len(names), limits)
        groups = {}
        for name in names:
            folders = {controller: parent / own / name for controller, parent in parents.items()}
            groups[name] = new_group(name, limits, folders)
        yield groups


def parent_of(controller: str, limits: Limits, places) -> Path:
    """Return the folder for groups with this controller: this process's own group if possible.

    In version 2 a group with processes cannot give controllers to groups inside it. Then return the nearest outer group
    that can.
    """
    for folder in own_groups(controller, places):
        return folder
    around = own_groups(VERSION_2, places)
    if not around or controller not in text_of(around[-1] / "cgroup.controllers").split():
        raise ClusterError(
            f"{FLAGS[controller]}: this machine has no control groups with the controller {controller!r} "
            "(/proc/cgroups, /sys/fs/cgroup): leave it out"
        )
    for folder in around:
        with suppress(OSError):
            offered = text_of(folder / "cgroup.subtree_control").split()
            if not set(limits.controllers) <= set(offered):
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in limits.controllers))
            return folder
    raise ClusterError(
        f"{FLAGS[controller]}: no control group from {around[0]} outwards may have limited groups in it: start this on "
        "the machine itself, not in a container"
    )


def is_version_2(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


def make_group(folder: Path) -> None:
    """Make a folder, which the kernel fills with files."""
    with said_plainly(folder):
        folder.mkdir()


def set_file(file: Path, text: str) -> None:
    with said_plainly(file):
        file.write_text(text)


@contextmanager
def said_plainly(path: Path):
    """Raise a ClusterError in one line when the kernel refuses."""
    try:
        yield
    except OSError as error:
        raise ClusterError(f"this machine does not let us limit hosts: {path}: {error.strerror}") from None


def share_alike(folder: Path, controller: str, hosts: int, limits: Limits) -> None:
    """Set the weight of the group that contains all hosts: each host gets as much CPU time as a process outside.

    By default the scheduler gives a whole group as much CPU time as one process.
    """
    if is_version_2(folder):
        set_file(folder / "cgroup.subtree_control", " ".join(f"+{name}" for name in limits.controllers))
    if controller == "cpu":
        name, weight, most = ("cpu.weight", 100, 10_000) if is_version_2(folder) else ("cpu.shares", 1024, 1 << 18)
        set_file(folder / name, str(min(weight * hosts, most)))


def new_group(name: str, limits: Limits, folders: dict[str, Path]) -> ControlGroup:
    for folder in dict.fromkeys(folders.values()):
        make_group(folder)
    for controller, folder in folders.items():
        for file, text in settings_of(controller, limits, is_version_2(folder)).items():
            if file not in OPTIONAL or (folder / file).exists():
                set_file(folder / file, text)
    return ControlGroup(name, limits, folders)


def settings_of(controller: str, limits: Limits, version_2: bool) -> dict[str, str]:
    """Return {file: text} in the order of writing: the limit of memory with swap must not fall below that of memory."""
    if controller == "memory" and version_2:
        return {"memory.max": str(limits.memory), "memory.swap.max": "0"}
    if controller == "memory":
        return {"memory.limit_in_bytes": str(limits.memory), "memory.memsw.limit_in_bytes": str(limits.memory)}
    period = max(PERIOD_US, round(LEAST_QUOTA_US / limits.cores))
    quota = max(LEAST_QUOTA_US, round(limits.cores * period))
    if version_2:
        return {"cpu.max": f"{quota} {period}"}
    return {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)}


@contextmanager
def janitor(folders: list[Path]):
    """Remove the folders after the block, or when this process has ended. folders: innermost first."""
    # In a new session the janitor does not get Ctrl-C or SIGHUP from the terminal. It does not inherit our output: if
    # that is a pipe, its reader would wait until the janitor ends.
    process = subprocess.Popen(
        ["sh", "-c", JANITOR, "sh", *folders], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(JANITOR_LIMIT_S)
