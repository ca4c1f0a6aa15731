"""Find this process's launcher and the machine's mpiruns. Needs no MPI."""

import os
import re
import shutil
from pathlib import Path

from dist.control_groups import text_of
from dist.probe.programs import find_mpirun, mpi_family, tool_output

NEVER = 1 << 32  # seconds since 1970; SLURM reports a later time for a job without a limit
# Processes that start ranks. A rank's launcher is its nearest ancestor among them.
LAUNCHERS = {
    "hydra_pmi_proxy": "mpirun (MPICH's Hydra)",
    **dict.fromkeys(("prterun", "prted", "orterun", "orted"), "mpirun (Open MPI)"),
    "slurmstepd": "srun",
}


def job_end(environment=os.environ) -> float | None:
    """Return when the job's time limit ends, in seconds since 1970; None if there is no limit or it is unknown.

    Newer releases of SLURM set SLURM_JOB_END_TIME. For 22.05, scripts/slurm/train.sbatch sets it, from squeue.
    """
    text = environment.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdecimal() and 0 < int(text) < NEVER else None


def find_launcher() -> str:
    """Describe the launcher of this process."""
    return launcher_kind(next((name for name in _processes_above() if name in LAUNCHERS), None), os.environ)


def launcher_kind(above: str | None, environment) -> str:
    """Name the launcher. above: the nearest ancestor among LAUNCHERS, or None."""
    if above == "slurmstepd" and "SLURM_STEP_ID" not in environment:
        return "none, a batch script's own process"
    if above or "OMPI_COMM_WORLD_SIZE" in environment:
        return LAUNCHERS[above or "prterun"]
    return "one that speaks PMI" if "PMI_SIZE" in environment else "none"


def _processes_above():
    """Yield the names of this process's ancestors, nearest first, cut at 15 characters or a colon."""
    process = os.getppid()
    while process > 1 and (status := text_of(Path(f"/proc/{process}/stat"))):
        before, _, after = status.rpartition(")")
        yield before.partition("(")[2].split(":")[0]
        process = int(after.split()[1])


def find_mpiruns() -> list[dict]:
    """Return the mpirun on PATH and, if different, the one beside this Python."""
    found = []
    for path, where in ((shutil.which("mpirun"), "on PATH"), (find_mpirun(), "beside this Python")):
        if path and not any(os.path.samefile(path, other["path"]) for other in found):
            text = tool_output(path, "--version") or ""
            number = re.search(r"\b\d+\.[^\s,()]+", text)
            version = number[0] if number else "version unknown"
            found.append({"path": path, "where": where, "family": mpi_family(text), "version": version})
    return found
