"""Three hosts of one rank each, and training on them under this MPI's mpirun or under srun: virtual ones, as root."""

import shlex
import subprocess
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from dist.probe.programs import is_open_mpi
from scripts.cluster.hosts import Host, running_hosts
from scripts.cluster.launch import launch_environment, launch_options, mpirun_here, write_launch_files
from scripts.cluster.network import SWITCH, connect, host_addresses, node_name, node_ports
from scripts.cluster.slurm_daemons import running_slurm

NODES = 3
RATE = "10gbit"
JOBS_AT_ONCE = 2  # a core of each node for each


class Cluster:
    """Running hosts: `head` and `nodes`; so many ranks are started by `prefix(ranks)` in `environment`."""

    def __init__(self, head: Host, nodes: list[Host], prefix: Callable[[int], list[str]], environment: dict[str, str]):
        self.head, self.nodes, self._prefix, self._environment = head, nodes, prefix, environment

    def start(self, command: list[str], output: Path, ranks: int = NODES) -> subprocess.Popen:
        """`command` as one rank on each of the first hosts; what they and the launcher print is added to `output`."""
        return self._start([*self._prefix(ranks), *command], output)

    def start_supervised(self, command: list[str], output: Path, ranks: int = NODES) -> subprocess.Popen:
        """`command` once, on the head, with --launcher: what starts the ranks."""
        return self._start([*command, "--launcher", shlex.join(self._prefix(ranks))], output)

    def _start(self, command: list[str], output: Path) -> subprocess.Popen:
        words = ["env", f"--chdir={Path.cwd()}", *command]
        with open(output, "a") as file:
            return subprocess.Popen(
                self.head.enter(*words), env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def cut_cable(self, node: int) -> None:
        """At the switch: the node itself only sees that nothing is connected any more."""
        self.head.on_network("ip", "link", "set", node_name(node), "down")

    def mend_cable(self, node: int) -> None:
        self.head.on_network("ip", "link", "set", node_name(node), "up")

    def block_port(self, node: int) -> None:
        """The switch passes nothing on, and the link stays up."""
        self.head.on_network("ip", "link", "set", node_name(node), "nomaster")

    def open_port(self, node: int) -> None:
        self.head.on_network("ip", "link", "set", node_name(node), "master", SWITCH)


@contextmanager
def mpirun_hosts():
    """Under this Python's own mpirun."""
    mpirun = mpirun_here()
    with running_hosts(host_addresses(NODES)) as (head, nodes):
        connect(head, nodes, node_ports(NODES, RATE, []), None, "reno")
        write_launch_files(head, nodes, [1] * NODES, is_open_mpi(mpirun))
        yield Cluster(
            head, nodes, lambda ranks: [mpirun, "-n", str(ranks), *launch_options(mpirun)],
            launch_environment(mpirun, NODES),
        )  # fmt: skip


@contextmanager
def slurm_hosts():
    """Under srun, as scripts/slurm/train.sbatch calls it."""
    plugin = "pmix" if is_open_mpi(mpirun_here()) else "pmi2"
    with running_slurm(NODES, JOBS_AT_ONCE, 0, RATE) as slurm:
        yield Cluster(
            slurm.head, slurm.nodes,
            lambda ranks: ["srun", f"--mpi={plugin}", f"-N{ranks}", f"-n{ranks}", "--kill-on-bad-exit=1"],
            slurm.environment(),
        )  # fmt: skip


def launchers() -> dict:
    """{name: context manager} of this Python's MPI."""
    if is_open_mpi(mpirun_here()):
        return {"mpirun (Open MPI)": mpirun_hosts, "srun --mpi=pmix (Open MPI)": slurm_hosts}
    return {"mpirun (MPICH)": mpirun_hosts, "srun --mpi=pmi2 (MPICH)": slurm_hosts}
