"""virtual_slurm.py: a SLURM that starts, runs a command, waits for its jobs and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import virtual_slurm
from scripts.cluster import program
from scripts.cluster.hosts import ClusterError, child_processes
from tests.suites.faults.processes import wait_until
from tests.suites.test_virtual_cluster import alive
from tests.support.virtual_hosts import missing_hosts, needs

pytestmark = pytest.mark.any_mpi

SCRIPTS = Path(__file__).parents[2] / "scripts"


TIME_LIMIT_S = 60
MISSING = missing_hosts(virtual_slurm.check_slurm)
needs_slurm = needs(MISSING)


def script_command(*flags, command=("true",)) -> list[str]:
    return [sys.executable, str(SCRIPTS / "virtual_slurm.py"), *map(str, flags), *(["--", *command] * bool(command))]


def run_script(*flags, command=("true",)) -> subprocess.CompletedProcess:
    return subprocess.run(script_command(*flags, command=command), capture_output=True, text=True, timeout=TIME_LIMIT_S)


@needs_slurm
def test_the_command_its_exit_code_and_the_jobs_it_leaves(tmp_path):
    """The SLURM waits for a job that the command only submitted."""
    file = tmp_path / "file"
    line = f"sbatch --output=/dev/null --wrap 'sleep 0.5; uname -n > {file}'; uname -n; exit 7"
    result = run_script("run", "--nodes", 1, command=["sh", "-c", line])
    assert result.returncode == 7, result.stderr
    assert "head\nwaiting for these jobs (Ctrl-C ends them):\n1 wrap " in result.stdout
    assert file.read_text() == "node0\n"


@needs_slurm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_stays_after(number, tmp_path):
    """No process, interface, mount or line of /etc/hosts."""
    machine = [Path("/etc/hosts").read_text(), sorted(os.listdir("/sys/class/net")), Path("/proc/mounts").read_text()]
    word = f"64.{os.getpid()}"
    line = ["sh", "-c", f"touch {tmp_path}/ready; srun sleep {word}"]
    script = subprocess.Popen(script_command("run", "--nodes", 2, command=line), stdin=subprocess.DEVNULL)
    assert wait_until(lambda: (tmp_path / "ready").exists() and alive(word), TIME_LIMIT_S)
    keepers = child_processes(script.pid)
    script.send_signal(number)
    assert script.wait(TIME_LIMIT_S) == (-number if number == signal.SIGKILL else 128 + number)
    left = [f"/proc/{pid}" for pid in keepers]
    assert wait_until(lambda: not alive(word) and not any(map(os.path.exists, left)), TIME_LIMIT_S)
    after = [Path("/etc/hosts").read_text(), sorted(os.listdir("/sys/class/net")), Path("/proc/mounts").read_text()]
    assert after == machine


def test_what_the_machine_lacks_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="only root"):
        virtual_slurm.check_slurm()
    monkeypatch.setattr(program, "check_machine", lambda: None)
    monkeypatch.setattr(program.shutil, "which", lambda tool: None if tool == "munged" else tool)
    with pytest.raises(ClusterError, match="no command 'munged': install munge"):
        virtual_slurm.check_slurm()
