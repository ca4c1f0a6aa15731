"""The folder that shared memory of a node's ranks comes from: what is free there, and what killed jobs have left.

MPICH makes its files there, and those of shared windows; Open MPI its segments. None of them asks first: the window is
made all the same, and the first touch of a page that is not there kills a rank without a word (SIGBUS).
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "/dev/shm"
SEGMENT = re.compile(r"mpich_shm_\w+|(sm|vader)_segment\.\S+|osc_(sm|rdma)\S*|psm[23]?_shm\S*|ompi[._]\S+")
OLD_S = 10.0  # a file may be made, and not be mapped yet
NAMED_AT_MOST = 3
# What MPICH 5.0.2 takes for each rank of a node as it starts, 1,057,344 bytes, and room for small windows.
MPICH_START_BYTES = 1_100_000


def free_bytes(folder: str = FOLDER) -> int | None:
    """None where nothing is known of it."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def lack_of_room(what: str, needed: int, free: int, other: str = "") -> str:
    """What to say where `needed` bytes are more than are free. other: what to do beside enlarging it, "or ..."."""
    left = left_segments()
    room = f"remove what killed jobs have left there ({rm_command(left)}), or " if left else ""
    return (
        f"{FOLDER} has {free / 1e6:.1f} MB free, expected {needed / 1e6:.1f} MB for {what}: {room}enlarge it "
        f"(mount -o remount,size=SIZE {FOLDER}; docker --shm-size=SIZE){other}"
    )


def start_problem(environment) -> str | None:
    """What keeps MPICH from starting on this node, as far as its launcher says how many ranks there are to be."""
    ranks = environment.get("MPI_LOCALNRANKS", "1")
    if not ranks.isdecimal() or (free := free_bytes()) is None:
        return None
    needed, host = int(ranks) * MPICH_START_BYTES, os.uname().nodename
    if free < needed:  # another rank of this job may have begun to take its share
        free += sum(size for _, size in _segments(FOLDER, is_old=False))
    return None if free >= needed else f"{host}: {lack_of_room(f'the start of MPICH with {ranks} ranks', needed, free)}"


def left_segments(folder: str = FOLDER, proc: str = "/proc") -> list[tuple[str, int]]:
    """(path, bytes in use) of this user's segments of MPI libraries that no process maps, the largest first.

    A process of another container that shares the folder is not seen from here: so they are removed only by who asks
    for it (doctor.py --remove-segments).
    """
    found = _segments(folder, is_old=True)
    used = _mapped(folder, proc) if found else set()
    return sorted((pair for pair in found if pair[0] not in used), key=lambda pair: -pair[1])


def remove_left_segments(folder: str = FOLDER) -> list[tuple[str, int]]:
    """Remove what left_segments gives, and return what of it this process has removed."""
    removed = []
    for path, size in left_segments(folder):
        with suppress(OSError):  # another rank was faster
            os.unlink(path)
            removed.append((path, size))
    return removed


def _segments(folder: str, is_old: bool) -> list[tuple[str, int]]:
    """(path, bytes in use) of this user's segments that nobody has touched for OLD_S, or of the others."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                age = time.time() - max(status.st_mtime, status.st_ctime)
                if SEGMENT.fullmatch(entry.name) and status.st_uid == os.geteuid() and (age > OLD_S) == is_old:
                    found.append((entry.path, 512 * status.st_blocks))
    return found


def rm_command(left: list[tuple[str, int]]) -> str:
    """What removes them, as far as a line has room."""
    names = " ".join(path for path, _ in left[:NAMED_AT_MOST])
    return f"rm {names}" + (f" and {len(left) - NAMED_AT_MOST} more" if len(left) > NAMED_AT_MOST else "")


def _mapped(folder: str, proc: str) -> set[str]:
    """Paths within the folder that some process maps or holds open."""
    used = set()
    for process in Path(proc).glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            used |= {line[line.index(folder) :] for line in lines if f" {folder}/" in line}
        with suppress(OSError):
            used |= {os.readlink(handle) for handle in (process / "fd").iterdir()}
    return used
