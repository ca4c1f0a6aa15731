"""Hosts on one machine, made of Linux namespaces that end with the process that made them.

A host is one first process in namespaces of its own: network (its ports and addresses), UTS (its name), IPC and PID
(else MPI libraries take shared memory or another process's memory between "hosts"), and mount, with its own /proc,
/sys (interfaces are looked up there) and /dev/shm (which also is TMPDIR: Open MPI keeps a folder per host there).

The first process reads a pipe from this one. However this process ends, SIGKILL included, the pipe closes, the first
process ends, and the kernel ends all others in its PID namespace and removes the interfaces. Nodes are made inside the
head, so one pipe decides for all. Nothing has a name outside, so two clusters cannot collide and nothing stays on disk.
"""

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from dist.control_groups import PLACES
from scripts.cluster.groups import NO_LIMITS, ClusterError, Group, Limits, limited_groups, remove_left_groups

HEAD = "head"
HEAD_MARK = "virtual-cluster-head"  # an argument of the process that holds a head, to find it by
NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]
END_LIMIT_S = 10
# Arguments: the host's name, the text of /etc/hosts, the owner's process ID for those who look for owners, and where
# control groups are mounted, if the host is to see them: a rank there asks for its limits, and the head's agent joins.
FIRST_PROCESS = """
set -e
mount -t tmpfs tmpfs /dev/shm
mkdir /dev/shm/sys
mount -t sysfs sysfs /dev/shm/sys
[ -z "$4" ] || mount --rbind "$4" "/dev/shm$4"
mount --move /dev/shm/sys /sys
rmdir /dev/shm/sys
printf %s "$2" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
echo "$1" > /proc/sys/kernel/hostname
echo ready
exec cat
"""


class Host:
    """One running host. `pid`: its first process, as this process counts; `group`: what limits it, if anything does."""

    def __init__(
        self, name: str, addresses: str, inside: "Host | None" = None, group: Group | None = None, groups: str = ""
    ):
        """`addresses`: its /etc/hosts. `inside`: the host whose death is to be its death. ClusterError if refused.

        `groups`: where control groups are mounted, "" to hide them.
        """
        self.name, self.group = name, group
        mark = f"virtual-cluster-{name}" if inside else HEAD_MARK
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--"]
        command += ["sh", "-c", FIRST_PROCESS, mark, name, addresses, str(os.getpid()), groups]
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C is for the owner, who stops mpirun first.
        self._keeper = subprocess.Popen(
            inside.enter(*command) if inside else command,
            stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True,
        )  # fmt: skip
        if self._keeper.stdout.readline() != "ready\n":
            why = self._keeper.communicate()[1].strip().splitlines() or ["no reason given"]
            raise ClusterError(f"this machine does not let us make the namespaces of a host: {why[-1]}")
        self.pid = innermost_child(self._keeper.pid)

    def outside(self, path: str) -> Path:
        """One of the host's own files, as this process sees it."""
        return Path(f"/proc/{self.pid}/root{path}")

    def enter(self, *command: str) -> list[str]:
        """The command that runs `command` on this host, within its limits, in the root folder."""
        entering = ["nsenter", "--target", str(self.pid), "--all", "--", *command]
        return self.group.joined(*entering) if self.group else entering

    def enter_here(self, *command: str) -> list[str]:
        """The same in this process's folder: entering the mount namespace ends in the root folder."""
        return self.enter("env", f"--chdir={Path.cwd()}", *command)

    def on_network(self, *command: str, text: str = "") -> str:
        """Output of `command` fed with `text`, run by this process's own tools on the host's network.

        ClusterError with the command's own words if it fails.
        """
        return output_of(["nsenter", "--target", str(self.pid), "--net", "--", *command], input=text)

    def end(self) -> None:
        """The host and all that runs on it are gone when this returns."""
        self._keeper.stdin.close()
        try:
            self._keeper.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()
        self._keeper.stderr.close()


def output_of(command: list[str], **options) -> str:
    """What a command prints; options: subprocess.run's. ClusterError with its own words if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, **options)
    if result.returncode:
        raise ClusterError(" ".join((result.stderr or result.stdout).split()))
    return result.stdout


@contextmanager
def running_hosts(addresses: dict[str, str], prepare_head=lambda head: None, limits: Limits = NO_LIMITS):
    """(head, nodes): one node for each name but the head's in {name: IP address}; all gone at the end of the block.

    prepare_head(head) is called before there are nodes, which see the file systems that it mounts. limits: each node's.
    """
    hosts_file = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    hosts, names = [], [name for name in addresses if name != HEAD]
    with equal_cores(), limited_groups(names, limits) as groups:
        mount = str(PLACES[0]) if groups else ""
        try:
            hosts.append(Host(HEAD, hosts_file, groups=mount))
            prepare_head(hosts[0])
            for name in names:
                hosts.append(Host(name, hosts_file, inside=hosts[0], group=groups.get(name), groups=mount))
            yield hosts[0], hosts[1:]
        finally:
            for host in hosts:
                host.end()


@contextmanager
def equal_cores(setting: Path = Path("/proc/sys/kernel/sched_autogroup_enabled")):
    """Every process gets as much of the machine's cores, while the block lasts: Linux may share them out by sessions.

    Open MPI makes a session of each host. The ranks of a host with two would compute half as fast as others, and a
    verdict on them would be right about the hosts and wrong about the job.
    """
    is_changed = False
    with suppress(OSError):  # a kernel without it, or a container that may not change it
        if setting.read_text().strip() == "1":  # else another cluster has changed it, and will change it back
            setting.write_text("0")
            is_changed = True
    try:
        yield
    finally:
        if is_changed:
            setting.write_text("1")


def innermost_child(pid: int) -> int:
    """The end of the chain of only children of a process: behind nsenter and unshare, what they started."""
    while children := child_processes(pid):
        pid = children[0]
    return pid


def child_processes(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def pid_inside(pid: int, host: Host) -> int:
    """A process's ID as processes on `host` count, where it is in a PID namespace of the host or below."""
    return namespace_pids(pid)[len(namespace_pids(host.pid)) - 1]


def namespace_pids(pid: int) -> list[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(word) for word in status.partition("NSpid:")[2].splitlines()[0].split()]


def end_clusters(running_too: bool = False) -> int:
    """How many clusters were ended: those whose script is gone; with `running_too` all others as well."""
    ended = [pid for pid in head_keepers() if running_too or not is_owned(pid)]
    for pid in ended:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # --kill-child: the head's first process ends with it, and all in there
    deadline = time.monotonic() + END_LIMIT_S
    while set(ended) & set(head_keepers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    while not remove_left_groups() and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(ended)


def head_keepers() -> list[int]:
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in numbers if (words := command_line(pid))[:1] == ["unshare"] and HEAD_MARK in words]


def is_owned(keeper: int) -> bool:
    """Whether the parent still is the process that made the cluster, and not whoever adopts orphans."""
    words = command_line(keeper)
    try:
        parent = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
        # In a PID namespace of its own the owner counts itself differently than we do.
        return int(words[words.index(HEAD_MARK) + 3]) in namespace_pids(parent)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return True  # ended meanwhile: nothing to clean


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
