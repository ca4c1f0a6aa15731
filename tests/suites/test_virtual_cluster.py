"""virtual_cluster.py: hosts that are apart, ports that keep their rate, and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from scripts import virtual_cluster, virtual_slurm
from scripts.cluster import launch, program
from scripts.cluster.hosts import (
    HEAD_MARK,
    ClusterError,
    child_processes,
    command_line,
    end_clusters,
    equal_cores,
    head_keepers,
    is_owned,
)
from scripts.cluster.hosts import innermost_child as first_process
from scripts.cluster.network import Port, node_ports, token_bucket
from tests.suites.faults.processes import wait_until
from tests.support.virtual_hosts import missing_hosts, needs

SCRIPTS = Path(__file__).parents[2] / "scripts"


TIME_LIMIT_S = 60
# Open MPI's daemon may miss the end of a rank that lives for milliseconds only, as `true` does, and wait for ever.
SHORT = ["sleep", "0.2"]
needs_cluster = needs(missing_hosts(program.check_machine, launch.mpirun_here))
# Prints one JSON object on rank 0: what each rank sees of its place.
PLACES = """
import json, os
from dist.world import start_world
world = start_world(expect_ranks=9)
seen = [world.rank, world.node, world.host, world.local_rank, sorted(os.listdir("/sys/class/net")), os.getcwd()]
seen = world.comm.gather(seen)
slow_start = world.comm.gather(int(open("/proc/sys/net/ipv4/tcp_slow_start_after_idle").read()))
world.print("RESULT", json.dumps({"nodes": world.node_count, "seen": seen, "slow_start": slow_start}))
"""
# Seconds of 1 MB from one rank to another, the median of three, after one that uses up the bucket's credit.
PAIRS = """
import json, time
import numpy as np
from dist.world import start_world
world = start_world()
comm, data, token = world.comm, np.ones(1_000_000, np.uint8), np.zeros(1)
times = {}
for source, goal in [(0, 1), (1, 0), (0, 2), (2, 0), (0, 3), (3, 0)]:
    seconds = []
    comm.Barrier()
    for _ in range(4):
        start = time.perf_counter()
        if world.rank == source: comm.Send(data, goal); comm.Recv(token, goal)
        if world.rank == goal: comm.Recv(data, source); comm.Send(token, source)
        seconds.append(time.perf_counter() - start)
    times[f"{source}>{goal}"] = sorted(comm.bcast(seconds, source)[1:])[1]
world.print("RESULT", json.dumps(times))
"""


def cluster_command(*flags, command=SHORT) -> list[str]:
    return [sys.executable, str(SCRIPTS / "virtual_cluster.py"), *map(str, flags), *(["--", *command] * bool(command))]


def start(*flags, command=SHORT, **options) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(cluster_command(*flags, command=command), stdout=pipe, stderr=pipe, text=True, **options)


def run(*flags, command=SHORT, **options) -> subprocess.CompletedProcess:
    line = cluster_command(*flags, command=command)
    return subprocess.run(line, capture_output=True, text=True, timeout=TIME_LIMIT_S, **options)


def result_of(tmp_path, program, *flags, **options):
    """What a program run as the cluster's ranks printed after RESULT."""
    file = tmp_path / "program.py"
    file.write_text(program)
    result = run("run", *flags, command=[sys.executable, str(file)], **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.partition("RESULT ")[2].splitlines()[0])


@needs_cluster
def test_hosts_and_placement(tmp_path):
    """9 ranks on 5 hosts are 2, 2, 2, 2, 1, though an outer launcher and a batch system left their traces."""
    traces = {"SLURM_NTASKS": "3", "SLURM_NNODES": "3", "SLURM_JOB_ID": "1", "PMI_RANK": "5", "PMI_SIZE": "7",
              "PMIX_RANK": "5", "OMPI_COMM_WORLD_SIZE": "7", "HYDRA_HOST_FILE": "/none"}  # fmt: skip
    flags = ["--nodes", 5, "--ranks", 9, "--ranks-per-node", 2, "--rate", "400mbit"]
    found = result_of(tmp_path, PLACES, *flags, env=os.environ | traces, cwd=tmp_path)
    assert found["nodes"] == 5
    expected = [[rank, rank // 2, f"node{rank // 2}", rank % 2, ["eth0", "lo"], str(tmp_path)] for rank in range(9)]
    assert found["seen"] == expected
    assert found["slow_start"] == [0] * 9


@pytest.mark.any_mpi
@needs_cluster
def test_every_direction_keeps_its_rate(tmp_path):
    """node1 is four times slower both ways, node2 only at what arrives; node3 is like node0."""
    slow = ["--slow", "node1:25mbit", "--slow", "node2:in:25mbit"]
    times = result_of(tmp_path, PAIRS, "--nodes", 4, "--ranks", 4, "--rate", "100mbit", *slow)
    fast = (times["0>3"] + times["3>0"]) / 2
    for pair in ("0>1", "1>0", "0>2"):
        assert 2.5 < times[pair] / fast < 6, times
    assert 0.5 < times["2>0"] / fast < 1.8, times


@needs_cluster
def test_exit_code_and_stray_processes():
    """The command's exit code comes back; what it left running in the background is gone."""
    stray = f"61.{os.getpid()}"
    # Popen closes the launcher's own files for the stray: mpirun waits for whoever holds them.
    program = (
        "import subprocess, sys, time\n"
        "closed = dict.fromkeys(['stdin', 'stdout', 'stderr'], subprocess.DEVNULL)\n"
        f"subprocess.Popen(['sleep', '{stray}'], start_new_session=True, **closed)\n"
        "time.sleep(0.2)\n"
        "sys.exit(7)"
    )
    command = [sys.executable, "-c", program]
    result = run("run", "--nodes", 2, "--ranks", 2, "--rate", "1gbit", command=command)
    assert result.returncode == 7, result.stderr
    assert not alive(stray)


def alive(word: str) -> list[int]:
    """Processes with this argument."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in numbers if word in command_line(pid)]


def sleeping_cluster(seconds: str) -> subprocess.Popen:
    """A cluster of 2 hosts whose ranks sleep, once they do."""
    script = start("run", "--nodes", 2, "--ranks", 2, "--rate", "1gbit", command=["sleep", seconds])
    # Its ranks are named by more processes than these two: mpirun's line has the word as well.
    assert wait_until(lambda: sum(command_line(pid)[:1] == ["sleep"] for pid in alive(seconds)) == 2, TIME_LIMIT_S)
    return script


def interfaces() -> str:
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_stays_after(number):
    """Not even of a script that is killed, and without a next start: the kernel cleans up."""
    before, seconds = interfaces(), f"62.{os.getpid()}"
    script = sleeping_cluster(seconds)
    keepers = child_processes(script.pid)
    script.send_signal(number)
    script.wait(TIME_LIMIT_S)
    assert script.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_until(lambda: not alive(seconds), TIME_LIMIT_S)
    assert interfaces() == before
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in keepers), TIME_LIMIT_S)


@needs_cluster
def test_what_a_killed_script_left_ends_with_the_next_start():
    """The hosts' first processes are stopped, so that none can see its pipe close."""
    end_clusters()
    seconds = f"63.{os.getpid()}"
    script = sleeping_cluster(seconds)
    for child in child_processes(script.pid):
        if command_line(first_process(child))[:1] == ["cat"]:
            os.kill(first_process(child), signal.SIGSTOP)
    script.kill()
    script.wait()
    assert alive(seconds)
    result = run("run", "--nodes", 1, "--ranks", 1, "--rate", "1gbit")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ended 1 virtual cluster that a killed run left behind\n")
    assert not alive(seconds)
    assert run("down", command=()).stdout == "no cluster to end\n"


def test_a_host_that_another_cluster_sees_begin_has_an_owner():
    """unshare forks, and for a moment the fork has its command line; its parent is not the cluster's script."""
    forks = "import os; os.fork(); print(flush=True); input()"
    command = ["unshare", "-c", forks, HEAD_MARK, "head", "addresses", str(os.getpid())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, executable=sys.executable, **pipes) as keeper:
        lines = [keeper.stdout.readline() for _ in range(2)]
        alike = [keeper.pid, *child_processes(keeper.pid)]
        owned = [is_owned(pid) for pid in alike]
        found = set(head_keepers())
        keeper.communicate(b"\n\n")
    assert lines == [b"\n", b"\n"]
    assert len(alike) == 2
    assert {*alike} <= found
    assert owned == [True, True]


@needs_cluster
def test_two_clusters_at_once():
    """Same names, same addresses, and neither sees the other nor cleans it away."""
    command = ["sh", "-c", "sleep 0.2; uname -n"]
    scripts = [start("run", "--nodes", 2, "--ranks", 2, "--rate", "1gbit", command=command) for _ in range(2)]
    for script in scripts:
        stdout, stderr = script.communicate(timeout=TIME_LIMIT_S)
        assert script.returncode == 0, stderr
        assert sorted(stdout.split()[-2:]) == ["node0", "node1"]


CLUSTER, LIMITED = "run --nodes 2 --ranks 3", "run --nodes 2 --ranks 2 --rate 1gbit"
MISTAKES = [
    (virtual_cluster, f"{CLUSTER} --rate 4pears", "'4pears' is not a rate"),
    (virtual_cluster, f"{CLUSTER} --rate 0mbit", "'0mbit' is not a rate: expected 1kbit or more"),
    (virtual_cluster, f"{CLUSTER} --rate 900000tbit", "the kernel refuses the rate 900000tbit: "),
    (virtual_cluster, f"{CLUSTER} --rate 1mbit --slow node2:1mbit",
     "--slow node2:1mbit: no host 'node2', they are node0 to node1"),
    (virtual_cluster, f"{CLUSTER} --rate 1mbit --slow node1:up:1mbit", "expected node2:100mbit, node2:in:100mbit or"),
    (virtual_cluster, f"{CLUSTER} --rate 1mbit --ranks-per-node 1", "3 ranks, but 2 places on 2 nodes"),
    (virtual_cluster, f"{CLUSTER} --rate 1mbit --congestion pear",
     "--congestion pear: in a namespace this kernel allows "),
    (virtual_cluster, f"{CLUSTER} --rate 1mbit --delay pear", "--delay pear: "),
    (virtual_cluster, f"{CLUSTER} --rate 1mbit --nodes 251", "--nodes 251: expected 1 to 250"),
    (virtual_cluster, f"{LIMITED} --memory-per-host 12Q",
     "--memory-per-host: '12Q' is not a size: expected one, like 512KiB or 600MB"),
    (virtual_cluster, f"{LIMITED} --memory-per-host 600",
     "--memory-per-host: '600' is not a memory limit: expected 16MB or more"),
    (virtual_cluster, f"{LIMITED} --cores-per-host many",
     "--cores-per-host: 'many' is not a number of cores: expected 0.01 to 4096"),
]  # fmt: skip
SLURM_MISTAKES = [
    (virtual_slurm, "run --nodes 0", "--nodes 0: expected 1 to 250"),
    (virtual_slurm, "run --nodes 1 --ranks-per-node 0", "--ranks-per-node must be 1 or more"),
    (virtual_slurm, "run --nodes 1 --rate pear", "'pear' is not a rate"),
]


@pytest.fixture
def signals():
    """The programs' own handlers end with the test."""
    before = {number: signal.getsignal(number) for number in program.ENDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.any_mpi
@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        *(pytest.param(*one, marks=needs_cluster) for one in MISTAKES),
        *(pytest.param(*one, marks=needs(missing_hosts(virtual_slurm.check_slurm))) for one in SLURM_MISTAKES),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_mistake_is_one_line(script, flags, says, monkeypatch, capfd):
    name = f"{script.__name__.rpartition('.')[2]}.py"
    monkeypatch.setattr(sys, "argv", [name, *flags.split(), "--", "true"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    printed = capfd.readouterr()
    assert printed.err.startswith(f"{name}: error: ")
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_what_the_machine_lacks_is_said(monkeypatch):
    monkeypatch.setattr(launch, "find_mpirun", lambda: None)
    with pytest.raises(ClusterError, match="no mpirun found"):
        launch.mpirun_here()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(ClusterError, match="no command 'tc': install iproute2"):
        program.check_machine()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="only root"):
        program.check_machine()


@pytest.mark.parametrize(
    ("ranks", "nodes", "per_node", "first_node", "placement"),
    [
        (9, 5, 2, None, [2, 2, 2, 2, 1]),
        (9, 5, None, None, [2, 2, 2, 2, 1]),
        (9, 5, 2, 1, [1, 2, 2, 2, 2]),
        (9, 5, None, 1, [1, 2, 2, 2, 2]),
        (4, 4, None, None, [1, 1, 1, 1]),
        (1, 2, None, None, [1, 0]),
        (3, 1, None, 3, [3]),
    ],
)
def test_place_ranks(ranks, nodes, per_node, first_node, placement):
    assert launch.place_ranks(ranks, nodes, per_node, first_node) == placement


def test_ports_and_their_buckets():
    ports = node_ports(3, "400mbit", ["node1:100mbit", "node2:out:50mbit", "node2:in:2.5gbit"])
    assert ports == [Port("400mbit", "400mbit"), Port("100mbit", "100mbit"), Port("50mbit", "2.5gbit")]
    words = token_bucket(400e6)
    assert words[words.index("rate") + 1] == "400000000bit"
    assert int(words[words.index("burst") + 1].removesuffix("b")) >= 1 << 16, "a packet of 64 KiB must fit"


@pytest.mark.any_mpi
def test_hosts_share_the_cores_by_processes_and_the_setting_comes_back(tmp_path):
    setting = tmp_path / "sched_autogroup_enabled"
    setting.write_text("1\n")
    with suppress(KeyError), equal_cores(setting):
        assert setting.read_text() == "0"
        raise KeyError
    assert setting.read_text() == "1"
    with equal_cores(setting):
        with equal_cores(setting):
            assert setting.read_text() == "0"
        assert setting.read_text() == "0", "the cluster that began first still runs"
    assert setting.read_text() == "1"
    with equal_cores(tmp_path / "no such setting"):
        assert not (tmp_path / "no such setting").exists()
