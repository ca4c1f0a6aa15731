"""Control groups of versions 1 and 2, in made-up trees: how virtual hosts are limited, and how their groups go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cluster import groups
from scripts.cluster.groups import ClusterError, Limits, kills_line, limited_groups, read_limits
from scripts.cluster.network import Port
from scripts.settings.units import UnitError
from scripts.virtual_cluster import cluster_table, crowd_line
from tests.suites.faults.processes import wait_until
from tests.unit.test_control_groups import tree

pytestmark = pytest.mark.any_mpi
VERSION_1 = "5:name=systemd:/\n4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n"
BOTH = Limits(0.4, 600_000_000)
NODES = ["node0", "node1"]
LIMIT_S = 20


@pytest.fixture
def kernel(monkeypatch):
    """What Linux does when a group is made: the files are there, as made-up ones of the group around it are."""

    def make(folder):
        folder.mkdir()
        for file in folder.parent.iterdir():
            if file.is_file():
                (folder / file.name).write_text("")

    monkeypatch.setattr(groups, "make_group", make)
    monkeypatch.setattr(groups, "JANITOR_LIMIT_S", 0)  # it cannot remove folders that hold files, and waits for them
    monkeypatch.setattr(groups, "JANITOR", "cat > /dev/null")


def contents(group, controller: str, *names: str) -> list[str]:
    return [(group.folders[controller] / name).read_text() for name in names]


def test_hosts_in_version_1(tmp_path, kernel):
    """In both trees below the own group: a quota of 4 ms in each 10 ms, memory the same with swap as without."""
    files = ("memory/job/memory.limit_in_bytes", "memory/job/memory.memsw.limit_in_bytes", "cpu,cpuacct/job/cpu.shares")
    places = tree(tmp_path, VERSION_1, dict.fromkeys(files, ""))
    with limited_groups(NODES, BOTH, places) as made:
        assert list(made) == NODES
        one = made["node1"]
        folder = tmp_path / "mount/memory/job"
        assert one.folders["memory"].parent.parent == folder
        assert one.folders["memory"].parent.name.startswith(f"virtual-cluster-{os.getpid()}-")
        assert one.folders["cpu"].parent.parent == tmp_path / "mount/cpu,cpuacct/job"
        assert contents(one, "cpu", "cpu.cfs_period_us", "cpu.cfs_quota_us") == ["10000", "4000"]
        swap = "memory.memsw.limit_in_bytes"
        assert contents(one, "memory", "memory.limit_in_bytes", swap) == ["600000000", "600000000"]
        assert (one.folders["cpu"].parent / "cpu.shares").read_text() == "2048", "as many as there are hosts"
        assert one.entrances == [f"{one.folders[name]}/cgroup.procs" for name in ("cpu", "memory")]


def test_hosts_in_version_2(tmp_path, kernel):
    """One tree; the own group has processes and offers nothing, the one around it does."""
    offers = "cpu memory pids"
    files = {"cgroup.controllers": offers, "user/cgroup.controllers": offers, "user/cgroup.subtree_control": offers,
             "user/session/cgroup.controllers": "", "user/memory.swap.max": ""}  # fmt: skip
    places = tree(tmp_path, "0::/user/session\n", files)
    (tmp_path / "mount/user/session/cgroup.subtree_control").mkdir()  # refuses to be written, as root has no refusals
    with limited_groups(NODES, BOTH, places) as made:
        top = made["node0"].folders["cpu"].parent
        assert top.parent == tmp_path / "mount/user"
        assert (top / "cgroup.subtree_control").read_text() == "+cpu +memory"
        assert (top / "cpu.weight").read_text() == "200"
        assert contents(made["node0"], "cpu", "cpu.max") == ["4000 10000"]
        assert contents(made["node0"], "memory", "memory.max", "memory.swap.max") == ["600000000", "0"]
        assert made["node0"].entrances == [f"{top}/node0/cgroup.procs"]


def test_a_kernel_without_swap_accounting(tmp_path, kernel):
    """Without limits there are no groups at all."""
    with limited_groups(NODES, Limits(), (tmp_path, tmp_path)) as made:
        assert made == {}
    places = tree(tmp_path, VERSION_1, {"memory/job/memory.limit_in_bytes": ""})
    with limited_groups(["node0"], Limits(memory=10**9), places) as made:
        assert contents(made["node0"], "memory", "memory.limit_in_bytes") == ["1000000000"]
        assert not (made["node0"].folders["memory"] / "memory.memsw.limit_in_bytes").exists()


@pytest.mark.parametrize(
    ("own", "files", "says"),
    [
        ("0::/\n", {"cgroup.controllers": "cpu pids"}, "--memory-per-host: this machine has no control groups with"),
        ("4:pids:/\n", {"pids/tasks": ""}, "--memory-per-host: this machine has no control groups with"),
        ("0::/a\n", {"cgroup.controllers": "cpu memory"}, "no control group from {0}.* outwards may have limited"),
    ],
)
def test_a_machine_that_has_no_such_groups(tmp_path, own, files, says):
    places = tree(tmp_path, own, files)
    (tmp_path / "mount/cgroup.subtree_control").mkdir()
    with pytest.raises(ClusterError, match=says.format(tmp_path)), limited_groups(NODES, Limits(memory=1), places):
        pass


def test_what_the_kernel_refuses_is_one_line(tmp_path):
    """A tree that may not be written, as in a container. A full device: what a write meets has no file's name."""
    places = tree(tmp_path, VERSION_1, {"cpu,cpuacct/job/tasks": ""})
    (tmp_path / "mount/cpu,cpuacct/job").rename(tmp_path / "mount/away")
    (tmp_path / "mount/cpu,cpuacct/job").symlink_to("/proc/self/fdinfo")
    with pytest.raises(ClusterError) as error, limited_groups(NODES, Limits(cores=1), places):
        pass
    assert str(error.value).startswith(f"this machine does not let us limit hosts: {tmp_path}/mount/cpu,cpuacct/job/")
    assert "\n" not in str(error.value)
    with pytest.raises(ClusterError, match="does not let us limit hosts: /dev/full: No space left on device"):
        groups.set_file(Path("/dev/full"), "1")


def test_flags():
    assert read_limits("0.4", "600MB") == BOTH
    assert read_limits("2", None) == Limits(cores=2.0)
    assert read_limits(None, "1GiB") == Limits(memory=2**30)
    with pytest.raises(UnitError, match=r"^--cores-per-host: '0' is not a number of cores: expected 0.01 to 4096"):
        read_limits("0", None)
    with pytest.raises(UnitError, match=r"^--memory-per-host: '12Q' is not a size: expected one, like 512KiB or 600MB"):
        read_limits("0.4", "12Q")
    with pytest.raises(UnitError, match=r"^--memory-per-host: '600' is not a memory limit: expected 16MB or more"):
        read_limits("0.4", "600")


@pytest.mark.parametrize(
    ("cores", "settings"),
    [(0.4, "4000 10000"), (1.5, "15000 10000"), (0.1, "1000 10000"), (0.03, "1000 33333"), (0.01, "1000 100000")],
)
def test_a_small_quota_gets_a_longer_period(cores, settings):
    """As the kernel takes no quota below 1 ms."""
    assert groups.settings_of("cpu", Limits(cores), True) == {"cpu.max": settings}
    quota, period = settings.split()
    expected = [("cpu.cfs_period_us", period), ("cpu.cfs_quota_us", quota)]
    assert list(groups.settings_of("cpu", Limits(cores), False).items()) == expected


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("memory.events", "low 0\nmax 31\noom 2\noom_kill 1\noom_group_kill 0\n",
         "host node2: its limit of 600 MB ended a process (memory.events: oom_kill 1)"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
         "host node2: its limit of 600 MB ended 3 processes (memory.oom_control: oom_kill 3)"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", None),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", None),
    ],
)  # fmt: skip
def test_what_a_limit_has_ended_is_said(tmp_path, file, text, line):
    (tmp_path / file).write_text(text)
    assert kills_line(groups.ControlGroup("node2", BOTH, {"memory": tmp_path})) == line
    assert kills_line(groups.ControlGroup("node2", Limits(cores=1), {"cpu": tmp_path})) is None


def test_a_command_joins_before_it_runs(tmp_path):
    """It does not run at all where it cannot."""
    group = groups.ControlGroup("node0", BOTH, {"cpu": tmp_path / "a", "memory": tmp_path / "b"})
    command = group.joined(sys.executable, "-c", "import sys; print(sys.argv[1:])", "--", "a b")
    (tmp_path / "a").mkdir()
    assert subprocess.run(command, capture_output=True).returncode
    (tmp_path / "b").mkdir()
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "['--', 'a b']\n"
    assert [(tmp_path / name / "cgroup.procs").read_text() for name in "ab"] == ["0\n", "0\n"]


def test_groups_go_with_the_process_that_made_them(tmp_path):
    """Also with one that is killed: the janitor sees that, and waits until a group is empty."""
    places = tree(tmp_path, VERSION_1, {"memory/job/tasks": ""})
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom scripts.cluster import groups\n"
        "groups.settings_of = lambda *arguments: {}\n"
        "places = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "with groups.limited_groups(['node0', 'node1'], groups.Limits(memory=1), places) as made:\n"
        "    (made['node0'].folders['memory'] / 'busy').mkdir()\n"
        "    print(made['node0'].folders['memory'], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, *map(str, places)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, cwd=Path(__file__).parents[2]) as killed:
        folder = Path(killed.stdout.readline().strip())
    assert wait_until(lambda: not (folder.parent / "node1").exists(), LIMIT_S)
    assert folder.exists()
    (folder / "busy").rmdir()
    assert wait_until(lambda: not folder.parent.exists(), LIMIT_S)


def test_the_table_shows_limits(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    ports = [Port("1gbit", "1gbit")] * 2
    lines = cluster_table({"node0": "10.77.0.1", "node1": "10.77.0.2"}, [1, 1], ports, BOTH).splitlines()
    assert lines[0].split()[-3:] == ["in", "cores", "memory"]
    assert [line.split()[-4:] for line in lines[1:]] == [["1gbit", "0.4", "600", "MB"]] * 2
    assert crowd_line(Limits(1.0), 2) == []
    assert crowd_line(Limits(1.1), 2) == ["2 hosts of 1.1 cores share this machine's 2: they will slow each other down"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)))
    assert crowd_line(Limits(0.28), 25) == [], "rounding or not"
