"""The limits of memory and CPU time that Linux's control groups set for this process.

SLURM, containers and virtual hosts use groups to limit the processes that they start. Version 1 has a tree of groups
for each controller (memory, cpu), version 2 one tree for all. A limit holds for all groups below it too, so parents of
this process's group count (the Linux kernel's Documentation/admin-guide/cgroup-v2.rst, scheduler/sched-bwc.rst).
"""

from pathlib import Path

PLACES = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # mounted groups; list of this process's groups
VERSION_2 = ""  # the line of version 2 in /proc/self/cgroup names no controllers: 0::/path
NO_LIMIT = 1 << 60  # version 1 shows a larger number for groups without a memory limit


def own_groups(controller: str, places=PLACES) -> list[Path]:
    """Return the folders of this process's group and of its parents, innermost first; [] without such a tree.

    controller: one of version 1's, such as "memory", or VERSION_2.
    """
    mount, own = places
    for line in text_of(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # If version 1 is mounted too, version 2 is in the folder `unified`.
            names = (controllers, controller) if controllers else ("unified",)
            top = next((mount / name for name in names if (mount / name).is_dir()), mount)
            group = top / path.lstrip("/")
            # In a container the path may be the host's and not exist here: then only the top group counts.
            return [folder for folder in (group, *group.parents) if folder.is_relative_to(top) and folder.is_dir()]
    return []


def memory_limit(places=PLACES) -> int | None:
    """Return the smallest memory limit of this process's groups, in bytes; None without a limit."""
    files = [folder / "memory.max" for folder in own_groups(VERSION_2, places)]
    files += [folder / "memory.limit_in_bytes" for folder in own_groups("memory", places)]
    texts = map(text_of, files)
    return min((int(text) for text in texts if text.isdecimal() and int(text) < NO_LIMIT), default=None)


def cpu_quota(places=PLACES) -> float | None:
    """Return the CPU time that this process's groups may use, in cores; None without a limit."""
    return min(cpu_quotas(places).values(), default=None)


def cpu_quotas(places=PLACES) -> dict[tuple[int, int], float]:
    """Return {key of a group, unique on this machine: CPU time that its processes may use together, in cores}."""
    texts = {folder: text_of(folder / "cpu.max") for folder in own_groups(VERSION_2, places)}
    for folder in own_groups("cpu", places):
        texts[folder] = " ".join(text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    pairs = {folder: text.split() for folder, text in texts.items()}
    # The key is (device, inode): in containers, different groups may have the same path.
    return {
        ((place := folder.stat()).st_dev, place.st_ino): int(pair[0]) / int(pair[1])
        for folder, pair in pairs.items()
        if len(pair) == 2 and all(map(str.isdecimal, pair))
    }


def text_of(path: Path) -> str:
    """Return the text of a file of /proc or /sys; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
