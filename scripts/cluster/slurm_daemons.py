"""A real SLURM on virtual hosts: MUNGE and slurmctld on the head, a slurmd on every node.

The daemons keep all files in a /run that only the hosts see, and end with the hosts. The configuration needs no
systemd, no control groups and no user named slurm; slurm.conf(5) describes the settings.
"""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager

from dist.probe.programs import OPEN_MPI_AS_ROOT
from scripts.cluster.hosts import HEAD, ClusterError, Host, output_of, running_hosts
from scripts.cluster.launch import PLACEMENT_VARIABLES
from scripts.cluster.network import Port, connect, host_addresses

RUNTIME = "/run"  # shared by the virtual hosts, hidden from the machine
FOLDER = f"{RUNTIME}/slurm"
CONFIG = f"{FOLDER}/slurm.conf"
MUNGE_FOLDER = f"{RUNTIME}/munge"  # where MUNGE's clients look for its socket
START_LIMIT_S = 30
KEY_BYTES = 128  # of a MUNGE key, mungekey's default
# Settings for both MPIs, because a job may use another MPI than this process.
MPI_SETTINGS = OPEN_MPI_AS_ROOT | {
    # All hosts share the machine's cores, so a waiting rank yields its core to a working one.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # MPICH sends SLURM's PMI2 the addresses of its ranks, and PMI2 reads 1,024 characters of a line. UCX addresses are
    # sometimes longer ("value not properly terminated in client request").
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    # With only libfabric's tcp provider, MPI_Init sometimes hangs when ranks connect to each other at the same time
    # (similar to https://github.com/ofiwg/libfabric/issues/9052).
    "FI_PROVIDER": "tcp;ofi_rxm",
}
SETTINGS = f"""\
ClusterName=virtual
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={FOLDER}/slurmctld.pid
StateSaveLocation={FOLDER}/state
SlurmdPidFile={FOLDER}/slurmd.%n.pid
SlurmdSpoolDir={FOLDER}/spool.%n
# The PMIx plugin makes a folder here with the job's number as its name, so nodes cannot share TmpFS.
TmpFS={FOLDER}/tmp.%n
# The life of a credential is also what a requeued job waits before it starts again.
AuthInfo=cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={FOLDER}/jobs.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# No MPI by default, as on many sites, where forgetting --mpi gives worlds of one rank.
MpiDefault=none
# Look often for jobs that may start now.
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=10
ReturnToService=2
# A node may have more CPUs than the machine.
SlurmdParameters=config_overrides
GresTypes=gpu
"""


class Slurm:
    """A running SLURM. head: the host on which users' commands run. daemons: {name of the log: process}."""

    def __init__(self, head: Host, nodes: list[Host]):
        self.head = head
        self.nodes = nodes
        self.daemons = {}

    def environment(self) -> dict[str, str]:
        """Return this process's environment without PLACEMENT_VARIABLES, plus settings for SLURM and MPI."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(PLACEMENT_VARIABLES)}
        return kept | MPI_SETTINGS | {"SLURM_CONF": CONFIG, "TMPDIR": "/dev/shm"}

    def output(self, *words: str) -> str:
        """Run a command on the head and return its output. Raise ClusterError with its message if it fails."""
        return output_of(self.head.enter_here(*words), env=self.environment())


@contextmanager
def running_slurm(nodes: int, cpus_per_node: int, gpus_per_node: int, rate: str):
    """Yield a Slurm with all nodes idle; after the block end it and its jobs. Raise ClusterError if it cannot start."""
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
    """Mount an empty /run for the head and for nodes created later."""
    subprocess.run(head.enter("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", RUNTIME), check=True)


def config_files(addresses: dict[str, str], cpus: int, gpus: int) -> dict[str, str]:
    """Return {file name: text} for /run/slurm. addresses: {name: IP address}. cpus, gpus: numbers per node."""
    nodes = [name for name in addresses if name != HEAD]
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    sizes = f"CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory_mb}{gres}"
    lines = [f"SlurmctldHost={HEAD}({addresses[HEAD]})"]
    lines += [f"NodeName={name} NodeAddr={addresses[name]} {sizes}" for name in nodes]
    lines += [f"PartitionName=main Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP"]
    return {
        "slurm.conf": SETTINGS + "\n".join(lines) + "\n",
        "gres.conf": "".join(f"NodeName={name} Name=gpu File={FOLDER}/gpu[0-{gpus - 1}]\n" for name in nodes if gpus),
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        # Open MPI from PyPI has a PMIx without MUNGE, and would complain on every rank.
        "mpi.conf": "PMIxEnv=PMIX_MCA_psec=native\n",
    }


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
    """Start a daemon in the foreground, so that it ends with its host. log: name of its log (the program's name)."""
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
