"""A real SLURM on virtual hosts: MUNGE and slurmctld on the head, a slurmd on every node.

All files of the daemons are in a /run that only the hosts see. The daemons end with the hosts.
"""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager

from dist.probe.programs import OPEN_MPI_AS_ROOT
from scripts.cluster.hosts import ClusterError, Host, output_of, running_hosts
from scripts.cluster.launch import PLACEMENT_VARIABLES
from scripts.cluster.network import Port, connect, host_addresses
from scripts.cluster.slurm_config import CONFIG, FOLDER, MUNGE_FOLDER, RUNTIME, config_files

START_LIMIT_S = 30
KEY_BYTES = 128  # of a MUNGE key, as mungekey makes it by default
# For both MPIs, as a job may use another one than this process.
MPI_SETTINGS = OPEN_MPI_AS_ROOT | {
    # A rank that waits leaves its core to one that works, as all hosts share the machine's cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # MPICH tells SLURM's PMI2 its ranks' addresses, in lines of which PMI2 reads 1,024 characters. Those of UCX are
    # sometimes longer ("value not properly terminated in client request").
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    # With libfabric's tcp alone MPI_Init sometimes hangs, when ranks connect to each other at the same time (similar
    # to https://github.com/ofiwg/libfabric/issues/9052).
    "FI_PROVIDER": "tcp;ofi_rxm",
}


class Slurm:
    """A running SLURM. head: where users' commands run. daemons: {name of the log: process}."""

    def __init__(self, head: Host, nodes: list[Host]):
        self.head = head
        self.nodes = nodes
        self.daemons = {}

    def environment(self) -> dict[str, str]:
        """Return this process's environment without PLACEMENT_VARIABLES, with settings for SLURM and MPI."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(PLACEMENT_VARIABLES)}
        return kept | MPI_SETTINGS | {"SLURM_CONF": CONFIG, "TMPDIR": "/dev/shm"}

    def output(self, *words: str) -> str:
        """Run a command on the head and return its output. Raise ClusterError with its message if it fails."""
        return output_of(self.head.enter_here(*words), env=self.environment())

    def jobs(self) -> list[str]:
        """Return a line for each waiting or running job: number, name, state, reason or nodes."""
        return self.output("squeue", "--noheader", "--format", "%i %j %T %R").splitlines()


@contextmanager
def running_slurm(nodes: int, cpus_per_node: int, gpus_per_node: int, rate: str):
    """Yield a Slurm with all nodes idle; end it and its jobs with the block. Raise ClusterError if it cannot start."""
    addresses = host_addresses(nodes)
    with running_hosts(addresses, prepare_head=mount_runtime_folder) as (head, hosts):
        connect(head, hosts, [Port(rate, rate)] * nodes, None, "reno")
        write_files(head, hosts, config_files(addresses, cpus_per_node, gpus_per_node), gpus_per_node)
        slurm = Slurm(head, hosts)
        try:
            start_daemons(slurm)
            yield slurm
        finally:
            for daemon in slurm.daemons.values():
                daemon.kill()  # only nsenter: the daemon itself ends with its host
                daemon.wait()


def mount_runtime_folder(head: Host) -> None:
    """Mount an empty /run for the head and for nodes that are made later."""
    subprocess.run(head.enter("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", RUNTIME), check=True)


def write_files(head: Host, nodes: list[Host], texts: dict[str, str], gpus: int) -> None:
    """Write the configuration, folders for the daemons, MUNGE's key, and device files that stand in for GPUs."""
    folder = head.outside(FOLDER)
    munge = head.outside(MUNGE_FOLDER)
    munge.mkdir(mode=0o755)
    (munge / "key").touch(mode=0o600)
    (munge / "key").write_bytes(os.urandom(KEY_BYTES))
    folder.mkdir(mode=0o755)
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("state", *(f"tmp.{node.name}" for node in nodes)):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    for gpu in range(gpus):
        subprocess.run(["mknod", folder / f"gpu{gpu}", "c", "1", "3"], check=True)  # /dev/null's numbers


def start_daemons(slurm: Slurm) -> None:
    """Start the daemons in order, and wait until every node is idle. Raise ClusterError if that fails."""
    start_daemon(slurm, slurm.head, "munged", "--foreground", f"--key-file={MUNGE_FOLDER}/key",
                 f"--seed-file={MUNGE_FOLDER}/seed")  # fmt: skip
    # Without MUNGE's socket slurmctld and slurmd end at once.
    wait_for(slurm.head.outside(f"{MUNGE_FOLDER}/munge.socket.2").exists, slurm)
    start_daemon(slurm, slurm.head, "slurmctld", "-D", "-i")
    for node in slurm.nodes:
        start_daemon(slurm, node, "slurmd", "-D", "-N", node.name, log=node.name)
    wait_for(lambda: all_idle(slurm), slurm)


def start_daemon(slurm: Slurm, host: Host, *command: str, log: str | None = None) -> None:
    """Start a daemon in the foreground, so that it ends with its host. log: the log's name, if not the program's."""
    name = log or command[0]
    with open(slurm.head.outside(f"{FOLDER}/{name}.log"), "w") as file:
        slurm.daemons[name] = subprocess.Popen(
            host.enter(*command), env=os.environ | {"SLURM_CONF": CONFIG}, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, start_new_session=True,
        )  # fmt: skip


def all_idle(slurm: Slurm) -> bool:
    try:
        states = slurm.output("sinfo", "--noheader", "--Node", "--format", "%T").split()
    except ClusterError:
        return False  # the controller does not answer yet
    return states == ["idle"] * len(slurm.nodes)


def wait_for(happens: Callable[[], bool], slurm: Slurm) -> None:
    """Wait until happens() is true. Raise ClusterError if a daemon ends, with its last line, or after START_LIMIT_S."""
    deadline = time.monotonic() + START_LIMIT_S
    while not happens():
        ended = next((name for name, daemon in slurm.daemons.items() if daemon.poll() is not None), None)
        if ended:
            raise ClusterError(f"{ended} ended at once: {last_words(slurm, ended)}")
        if time.monotonic() > deadline:
            name = list(slurm.daemons)[-1]
            raise ClusterError(f"no SLURM after {START_LIMIT_S} s; {name} says: {last_words(slurm, name)}")
        time.sleep(0.05)


def last_words(slurm: Slurm, name: str) -> str:
    lines = slurm.head.outside(f"{FOLDER}/{name}.log").read_text().split("\n")
    return next((line for line in reversed(lines) if line), "nothing")
