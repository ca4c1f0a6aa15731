"""What machine and which versions a number comes from: processor, cores, memory, and what limits leave of them."""

import os
import platform
import resource
from importlib.metadata import version
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # where groups are mounted, and which are this process's
NO_LIMIT = 1 << 60  # what control groups of version 1 show where nothing is limited is beyond


def machine() -> dict:
    return {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()}


def versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def _processor() -> str:
    """The processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def cores() -> dict:
    """affinity: the cores that this process may run on; quota: how many at once its groups allow, None for all."""
    return {"affinity": sorted(os.sched_getaffinity(0)), "count": os.cpu_count(), "quota": cpu_quota()}


def memory() -> dict:
    """Bytes: of the machine, available now, and the groups' limit, None without."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    return {"total": total, "free": free, "limit": memory_limit()}


def ulimits() -> dict:
    """What the shell allows: bytes that may be locked, files that may be open; None for unlimited."""
    kinds = {"locked_memory": resource.RLIMIT_MEMLOCK, "open_files": resource.RLIMIT_NOFILE}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def memory_limit(groups=GROUPS) -> int | None:
    """The smallest limit in bytes of this process's groups and those around them, versions 1 and 2."""
    texts = _values("memory.max", "", groups) + _values("memory.limit_in_bytes", "memory", groups)
    return min((int(text) for text in texts if text.isdecimal() and int(text) < NO_LIMIT), default=None)


def cpu_quota(groups=GROUPS) -> float | None:
    """How many cores' time this process's groups may use; None for no limit."""
    pairs = [text.split() for text in _values("cpu.max", "", groups)]
    pairs += zip(*(_values(f"cpu.cfs_{name}_us", "cpu", groups) for name in ("quota", "period")), strict=True)
    return min((int(pair[0]) / int(pair[1]) for pair in pairs if all(map(str.isdecimal, pair)) and pair), default=None)


def _values(name: str, controller: str, groups) -> list[str]:
    """What files `name` say in this process's group of a controller and in those around it; "" is all of version 2."""
    mount, own = groups
    texts = []
    for line in text_of(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # Version 1 has a tree for each set of controllers. In a container the path is the host's: the top counts.
            top = next((mount / folder for folder in (controllers, controller) if (mount / folder).is_dir()), mount)
            group = top / path.lstrip("/")
            texts += [text_of(folder / name) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return texts


def text_of(path: Path) -> str:
    """What a file of /proc or /sys says; "" where it is not to be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
