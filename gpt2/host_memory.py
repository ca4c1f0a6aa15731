"""How much host memory a process can still have, under Linux."""

import re
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """What the machine has available, or less where the process's control group is limited; None where nothing says.

    SLURM and containers set such limits (cgroup version 2). root: of the file system, another one for tests.
    """
    found = []
    if meminfo := _text(root / "proc/meminfo"):
        found += [1024 * int(number) for number in re.findall(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)]
    if own := re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE):
        top = root / "sys/fs/cgroup"
        group = top / own[1]
        found += [_left(folder) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    known = [number for number in found if number is not None]
    return min(known, default=None)


def _left(group: Path) -> int | None:
    """Of one control group's limit; pages of files do not count, they give way."""
    limit, current = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if not (limit.isdigit() and current.isdigit()):
        return None
    files = re.search(r"^file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(current) + (int(files[1]) if files else 0))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
