"""The folder of shared memory on a node: its free space, and the files that killed jobs have left there.

MPI libraries do not check for free space: the first access to a missing page kills a rank without a message.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "/dev/shm"
SEGMENT = re.compile(r"mpich_shm_\w+|(sm|vader)_segment\.\S+|osc_(sm|rdma)\S*|psm[23]?_shm\S*|ompi[._]\S+")
OLD_S = 10.0  # a younger file may have been created, but not mapped yet
NAMED_AT_MOST = 3
# For each rank of a node, MPICH 5.0.2 takes 1,057,344 bytes as it starts; the rest is for small windows.
MPICH_START_BYTES = 1_100_000


def free_bytes(folder: str = FOLDER) -> int | None:
    """Return the free bytes of the folder; None if they are unknown."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def lack_of_room(what: str, needed: int, free: int, other: str = "") -> str:
    """Return an error message: `needed` bytes exceed the `free` bytes. other: another remedy, ", or ..."."""
    left = left_segments()
    room = f"remove what killed jobs have left there ({rm_command(left)}), or " if left else ""
    return (
        f"{FOLDER} has {free / 1e6:.1f} MB free, expected {needed / 1e6:.1f} MB for {what}: {room}enlarge it "
        f"(mount -o remount,size=SIZE {FOLDER}; docker --shm-size=SIZE){other}"
    )


def start_problem(environment) -> str | None:
    """Return what keeps MPICH from starting on this node, if its launcher says how many ranks there will be."""
    ranks = environment.get("MPI_LOCALNRANKS", "1")
    if not ranks.isdecimal() or (free := free_bytes()) is None:
        return None
    needed = int(ranks) * MPICH_START_BYTES
    if free < needed:  # another rank of this job may have begun to take its share
        free += sum(size for _, size in _segments(FOLDER, is_old=False))
    if free >= needed:
        return None
    return f"{os.uname().nodename}: {lack_of_room(f'the start of MPICH with {ranks} ranks', needed, free)}"


def left_segments(folder: str = FOLDER, proc: str = "/proc") -> list[tuple[str, int]]:
    """Return (path, bytes in use) of this user's segments of MPI libraries that no process maps, the largest first.

    Processes of other containers that share the folder are invisible here: remove segments only if a user asks for it.
    """
    found = _segments(folder, is_old=True)
    used = _mapped(folder, proc) if found else set()
    return sorted((pair for pair in found if pair[0] not in used), key=lambda pair: -pair[1])


def remove_left_segments(folder: str = FOLDER) -> list[tuple[str, int]]:
    """Remove the segments that left_segments returns; return those that this process has removed."""
    removed = []
    for path, size in left_segments(folder):
        with suppress(OSError):  # another rank was faster
            os.unlink(path)
            removed.append((path, size))
    return removed


def _segments(folder: str, is_old: bool) -> list[tuple[str, int]]:
    """Return (path, bytes in use) of this user's segments untouched for OLD_S, or (not is_old) of the others."""
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
    """Return the command that removes these segments; it names at most NAMED_AT_MOST."""
    names = " ".join(path for path, _ in left[:NAMED_AT_MOST])
    return f"rm {names}" + (f" and {len(left) - NAMED_AT_MOST} more" if len(left) > NAMED_AT_MOST else "")


def _mapped(folder: str, proc: str) -> set[str]:
    """Return the paths within the folder that some process maps or holds open."""
    used = set()
    for process in Path(proc).glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            used |= {line[line.index(folder) :] for line in lines if f" {folder}/" in line}
        with suppress(OSError):
            used |= {os.readlink(handle) for handle in (process / "fd").iterdir()}
    return used
