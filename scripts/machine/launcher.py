"""Find the end of the job and the machine's mpiruns. Needs no MPI."""

import os
import re
import shutil

from dist.probe.programs import find_mpirun, mpi_family, tool_output

NEVER = 1 << 32  # seconds since 1970; SLURM reports a later time for a job without a limit


def job_end(environment=os.environ) -> float | None:
    """Return when the job's time limit ends, in seconds since 1970; None if there is no limit or it is unknown.

    Newer releases of SLURM set SLURM_JOB_END_TIME. For 22.05, scripts/slurm/train.sbatch sets it, from squeue.
    """
    text = environment.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdecimal() and 0 < int(text) < NEVER else None


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
