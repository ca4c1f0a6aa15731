"""The configuration files of a virtual SLURM: the controller on the head, one slurmd on every node.

They need no systemd, no control groups and no user named slurm. slurm.conf(5) describes the settings.
"""

import os

from scripts.cluster.hosts import HEAD

RUNTIME = "/run"  # shared by the virtual hosts, hidden from the machine
FOLDER = f"{RUNTIME}/slurm"
CONFIG = f"{FOLDER}/slurm.conf"
MUNGE_FOLDER = f"{RUNTIME}/munge"  # where MUNGE's clients look for its socket
PARTITION = "main"

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


def config_files(addresses: dict[str, str], cpus: int, gpus: int) -> dict[str, str]:
    """Return {file name: text} for /run/slurm. addresses: {name: IP address}. cpus, gpus: numbers per node."""
    nodes = [name for name in addresses if name != HEAD]
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    sizes = f"CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory_mb}{gres}"
    lines = [f"SlurmctldHost={HEAD}({addresses[HEAD]})"]
    lines += [f"NodeName={name} NodeAddr={addresses[name]} {sizes}" for name in nodes]
    lines += [f"PartitionName={PARTITION} Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP"]
    return {
        "slurm.conf": SETTINGS + "\n".join(lines) + "\n",
        "gres.conf": "".join(f"NodeName={name} Name=gpu File={FOLDER}/gpu[0-{gpus - 1}]\n" for name in nodes if gpus),
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        # Open MPI from PyPI has no MUNGE in its PMIx, and would complain on every rank.
        "mpi.conf": "PMIxEnv=PMIX_MCA_psec=native\n",
    }
