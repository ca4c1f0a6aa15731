"""Facts about this process's share of its machine: cores, memory, limits, interfaces, the place for run folders."""

import os
import resource
import tempfile
from functools import partial
from pathlib import Path

from scripts.checkup.facts import variables

THREAD_VARIABLES = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SRUN_CPUS_PER_TASK")
CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # what cgroup version 1 shows where nothing is limited is beyond
GBIT = 1e9 / 8  # bytes


def sections(out: Path) -> dict:
    return {
        "cores": cores,
        "memory": memory,
        "shared memory": shared_memory,
        "limits": limits,
        "interfaces": interfaces,
        "run folder": partial(run_folder, out),
    }


def cores() -> dict:
    """affinity: the cores that this process may run on; quota: how many at once its cgroup allows, None for all."""
    return {
        "affinity": sorted(os.sched_getaffinity(0)),
        "count": os.cpu_count(),
        "quota": cpu_quota(),
        "variables": variables(*THREAD_VARIABLES),
    }


def memory() -> dict:
    """Bytes: of the machine, available now, and this cgroup's limit, None without."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: int(lines[key].split()[0]) << 10 for name, key in (("total", "MemTotal"), ("free", "MemAvailable"))}
    return sizes | {"limit": memory_limit()}


def shared_memory() -> dict:
    """Bytes free in the folder that the shared buffers of a node's ranks take their memory from."""
    from dist.buffers import SHARED_MEMORY

    return {"folder": SHARED_MEMORY, "free": _free_bytes(Path(SHARED_MEMORY))}


def limits() -> dict:
    """What the shell's ulimit allows: bytes that may be locked, files that may be open; None for unlimited."""
    kinds = {"locked_memory": resource.RLIMIT_MEMLOCK, "open_files": resource.RLIMIT_NOFILE}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def interfaces() -> list[dict]:
    """{"name", "rate": bytes/s that it says it does, None if it does not, "kind": "ethernet" or "infiniband"}."""
    from dist.probe.ports import Ports

    return [{"name": name, "rate": _rate(name), "kind": _kind(name)} for name in Ports().names]


def run_folder(out: Path) -> dict:
    """Whether a file can be written where `out` is, or will be made, and how many bytes are free there."""
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if os.path.exists(folder))
    facts = {"path": str(out), "place": str(place), "free": None, "problem": None}
    try:
        facts["free"] = _free_bytes(place)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"x")
    except OSError as error:
        facts["problem"] = error.strerror or str(error)
    return facts


def memory_limit(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest limit in bytes of this process's cgroup and those around it, versions 1 and 2."""
    names = [("memory.max", ""), ("memory.limit_in_bytes", "memory")]
    found = [
        int(text)
        for name, controller in names
        for folder in _cgroup_folders(root, own, controller)
        if (text := _text(folder / name)).isdigit()
    ]
    return min((limit for limit in found if limit < NO_LIMIT), default=None)


def cpu_quota(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """How many cores' time this process's cgroup may use; None for no limit."""
    found = [_text(folder / "cpu.max").split() for folder in _cgroup_folders(root, own, "")]
    found += [
        [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        for folder in _cgroup_folders(root, own, "cpu")
    ]
    quotas = [int(pair[0]) / int(pair[1]) for pair in found if len(pair) == 2 and all(text.isdigit() for text in pair)]
    return min(quotas, default=None)


def _cgroup_folders(root: Path, own: Path, controller: str):
    """This process's folder of a controller ("" for all of version 2), and those above it up to the mount's."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = next((root / name for name in (controllers, controller) if (root / name).is_dir()), root)
            folder = top / path.lstrip("/")
            yield from (place for place in (folder, *folder.parents) if place.is_relative_to(top))


def _rate(name: str) -> float | None:
    """Ethernet's in Mbit/s, -1 or unreadable where unknown; InfiniBand's as "400 Gb/sec (4X NDR)"."""
    if _kind(name) == "infiniband":
        device, port = name.split(":")
        words = _text(Path(f"/sys/class/infiniband/{device}/ports/{port}/rate")).split()
        return float(words[0]) * GBIT if words else None
    text = _text(Path(f"/sys/class/net/{name}/speed"))
    return int(text) * GBIT / 1000 if text.isdigit() and int(text) else None


def _kind(name: str) -> str:
    """dist.probe.ports names an InfiniBand port by device and number, mlx5_0:1."""
    return "infiniband" if ":" in name else "ethernet"


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
