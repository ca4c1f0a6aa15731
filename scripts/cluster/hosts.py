"""Virtual hosts on one machine: Linux namespaces that end with the process that made them.

A host is a first process in new namespaces: network (its ports and addresses), UTS (its name), IPC and PID (else MPI
libraries would use shared memory, or read another process's memory, between "hosts"), and mount, with a separate /proc,
/sys (where MPI looks up interfaces) and /dev/shm (also TMPDIR: Open MPI keeps a folder per host there).

The first process reads a pipe from this process. However this process ends, SIGKILL included, the pipe closes, the
first process ends, and the kernel ends all others in its PID namespace and removes the interfaces. Nodes are made
inside the head, so one pipe is enough for all. No name is visible outside, so two clusters cannot collide, and nothing
remains on disk.
"""

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from dist.control_groups import PLACES
from scripts.cluster.groups import NO_LIMITS, ClusterError, Limits, limited_groups

HEAD = "head"
HEAD_MARK = "virtual-cluster-head"  # an argument that identifies the process that holds a head
NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]
END_LIMIT_S = 10
# Arguments: the host's name, the text of /etc/hosts, the owner's process ID (see is_owned), and the mount point of
# control groups, or "" to hide them. A rank reads its limits there, and the head's agent joins a host's groups there.
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
    """A running host. pid: of its first process, in this process's PID namespace; group: its limits or None."""

    def __init__(self, name: str, addresses: str, groups: str, inside: "Host | None" = None, group=None):
        """Start a host. Raise ClusterError if the kernel refuses.

        addresses: the text of /etc/hosts. groups: where control groups are mounted, "" to hide them. inside: an outer
        host; this host ends with it. group: the ControlGroup that limits this host.
        """
        self.name = name
        self.group = group
        mark = f"virtual-cluster-{name}" if inside else HEAD_MARK
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--"]
        command += ["sh", "-c", FIRST_PROCESS, mark, name, addresses, str(os.getpid()), groups]
        pipe = subprocess.PIPE
        # In a new session the host does not get Ctrl-C. The owner gets it, and stops mpirun first.
        self._keeper = subprocess.Popen(
            inside.enter(*command) if inside else command,
            stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True,
        )  # fmt: skip
        if self._keeper.stdout.readline() != "ready\n":
            why = self._keeper.communicate()[1].strip().splitlines() or ["no reason given"]
            raise ClusterError(f"this machine does not let us make the namespaces of a host: {why[-1]}")
        self.pid = innermost_child(self._keeper.pid)

    def outside(self, path: str) -> Path:
        """Return the path by which this process sees a file of the host."""
        return Path(f"/proc/{self.pid}/root{path}")

    def enter(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this host, within its limits, in the root folder."""
        entering = ["nsenter", "--target", str(self.pid), "--all", "--", *command]
        return self.group.joined(*entering) if self.group else entering

    def enter_here(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this host, in the current folder of this process."""
        return self.enter("env", f"--chdir={Path.cwd()}", *command)

    def on_network(self, *command: str, text: str = "") -> str:
        """Run a command of this machine in the host's network namespace, with `text` as input; return its output.

        Raise ClusterError with the command's message if it fails.
        """
        return output_of(["nsenter", "--target", str(self.pid), "--net", "--", *command], input=text)

    def end(self) -> None:
        """End the host and everything on it."""
        self._keeper.stdin.close()
        try:
            self._keeper.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()
        self._keeper.stderr.close()


def output_of(command: list[str], **options) -> str:
    """Return a command's output. options: for subprocess.run. Raise ClusterError with its message if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, **options)
    if result.returncode:
        raise ClusterError(" ".join((result.stderr or result.stdout).split()))
    return result.stdout


@contextmanager
def running_hosts(addresses: dict[str, str], prepare_head=lambda head: None, limits: Limits = NO_LIMITS):
    """Yield (head, nodes); end them with the block. addresses: {name: IP address} of the head and the nodes.

    prepare_head(head) is called before the nodes are made, so the nodes see file systems that it mounts. limits: for
    each node.
    """
    hosts_file = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    hosts = []
    names = [name for name in addresses if name != HEAD]
    with equal_cores(), limited_groups(names, limits) as groups:
        mount = str(PLACES[0]) if groups else ""
        try:
            hosts.append(Host(HEAD, hosts_file, mount))
            prepare_head(hosts[0])
            for name in names:
                hosts.append(Host(name, hosts_file, mount, hosts[0], groups.get(name)))
            yield hosts[0], hosts[1:]
        finally:
            for host in hosts:
                host.end()


@contextmanager
def equal_cores(setting: Path = Path("/proc/sys/kernel/sched_autogroup_enabled")):
    """While the block runs, share cores equally among processes, not among sessions as Linux may do.

    Open MPI makes a session for each host. Two ranks on one host would compute half as fast as a single rank on another
    host, and a verdict would blame hosts that are equal.
    """
    is_changed = False
    with suppress(OSError):  # the kernel lacks this setting, or a container may not change it
        if setting.read_text().strip() == "1":  # else another cluster has changed it and will restore it
            setting.write_text("0")
            is_changed = True
    try:
        yield
    finally:
        if is_changed:
            setting.write_text("1")


def innermost_child(pid: int) -> int:
    """Follow first children from `pid` to the last one: the process that nsenter and unshare have started."""
    while children := child_processes(pid):
        pid = children[0]
    return pid


def child_processes(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def pid_inside(pid: int, host: Host) -> int:
    """Return a process's ID in the PID namespace of `host`."""
    return namespace_pids(pid)[len(namespace_pids(host.pid)) - 1]


def namespace_pids(pid: int) -> list[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(word) for word in status.partition("NSpid:")[2].splitlines()[0].split()]


def end_clusters(running_too: bool = False) -> int:
    """End the clusters whose script has ended, or all if `running_too`. Return how many."""
    ended = [pid for pid in head_keepers() if running_too or not is_owned(pid)]
    for pid in ended:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # --kill-child then ends the head's first process, and with it all hosts
    deadline = time.monotonic() + END_LIMIT_S
    while set(ended) & set(head_keepers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(ended)


def head_keepers() -> list[int]:
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in numbers if (words := command_line(pid))[:1] == ["unshare"] and HEAD_MARK in words]


def is_owned(keeper: int) -> bool:
    """Return whether the keeper's parent still is the process that made the cluster, not one that adopts orphans."""
    words = command_line(keeper)
    try:
        parent = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
        if command_line(parent) == words:  # a fork of the keeper that is about to become the head's first process
            return True
        # In another PID namespace the owner has a different PID.
        return int(words[words.index(HEAD_MARK) + 3]) in namespace_pids(parent)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return True  # the keeper has ended by now: nothing to clean up


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
