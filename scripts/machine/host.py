"""Describe the machine: versions, processor, cores and memory with their limits, and when the job ends."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dist.control_groups import cpu_quota, memory_limit

NEVER = 1 << 32  # seconds since 1970; SLURM reports a later time for a job without a limit


def machine() -> dict:
    return {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()}


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the given packages that are installed."""
    found = {name: version_of(name) for name in packages}
    return {"python": platform.python_version()} | {name: text for name, text in found.items() if text}


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name according to Linux, or else its architecture."""
    return cpu_info("model name") or platform.machine()


def cpu_info(field: str, path: str = "/proc/cpuinfo") -> str:
    """Return what Linux reports in a field about the first core; "" if it reports nothing."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def cores() -> dict:
    """Return affinity: the cores that this process may use; count: all cores; quota: the cgroups' limit, or None."""
    return {"affinity": sorted(os.sched_getaffinity(0)), "count": os.cpu_count(), "quota": cpu_quota()}


def memory() -> dict:
    """Return bytes of memory: total; free: available now; limit: set by the cgroups, or None."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    return {"total": total, "free": free, "limit": memory_limit()}


def job_end(environment=os.environ) -> float | None:
    """Return when the job's time limit ends, in seconds since 1970; None if there is no limit or it is unknown.

    Newer releases of SLURM set SLURM_JOB_END_TIME. For 22.05, scripts/slurm/train.sbatch sets it, from squeue.
    """
    text = environment.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdecimal() and 0 < int(text) < NEVER else None
