"""Write files and folders atomically: after an interruption each is complete or unchanged.

Only regular files are replaced. A link to a regular file stays, and its target is replaced.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gpt2.errors import UserError, file_errors

TEMPORARY = ".*.tmp"  # matches the names of files that are being written
CANNOT_WRITE = "cannot write it: choose a folder that exists, is writable and has room"
LOOK_S = 0.005  # seconds between two attempts to take a lock
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def regular(path, flags: int) -> int:
    """Open a file, as an opener for open(). Refuse pipes and devices, which could wait for a writer forever."""
    refusal = OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise refusal if error.errno == errno.ENXIO else error from None  # a pipe without a reader, or a socket
    if not stat.S_ISREG(mode := os.fstat(handle).st_mode) and not stat.S_ISDIR(mode):  # open() itself refuses folders
        os.close(handle)
        raise refusal
    return handle


def read_bytes(path) -> bytes:
    """Read a regular file. OSError: it is not one, or cannot be read."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def user_cache_folder() -> Path | None:
    """Return this user's cache folder, created if missing, or None if none can be written.

    It lies in XDG_CACHE_HOME, or ~/.cache (XDG Base Directory Specification), or among the temporary files.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache, "gpt2-mpi")
    return folder if _can_keep(folder) else machine_folder()


def machine_folder() -> Path | None:
    """Return this user's folder among the machine's temporary files, created if missing, or None."""
    place = temporary_files()
    folder = place and place / f"gpt2-mpi-{os.getuid()}"
    return folder if folder and _can_keep(folder) else None


def temporary_files() -> Path | None:
    """Return the machine's folder for temporary files, or None if all are full or read-only."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return None


def _can_keep(folder: Path) -> bool:
    """Return whether files can be kept in this folder, created if missing. Permissions do not show read-only disks."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            # Among the temporary files, another user may have made a folder or a link of that name.
            return folder.lstat().st_uid == os.getuid() or folder.parent != temporary_files()
    except OSError:
        return False


@contextmanager
def alone(lock: Path, wait_s: float):
    """Run the block while holding a lock file, created if missing, against other processes of this machine.

    The lock ends with its process. After wait_s seconds without the lock, the block runs anyway.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # also if the file system has no locks
            file = stack.enter_context(open(lock, "w"))
            end = time.monotonic() + wait_s
            while time.monotonic() < end:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(LOOK_S)
        yield


def temporary_name(path: Path) -> Path:
    """Return a unique name beside `path`, also among nodes that share the disk."""
    return path.with_name(f".{uuid.uuid4().hex}.tmp")


@contextmanager
def new_file(path: Path):
    """Open a new binary file, and flush it to disk if the block succeeds. OSError: it exists, or cannot be written."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path):
    """Open a binary file to write. It replaces `path` if the block succeeds, and is removed otherwise.

    Readers see the old file or the complete new one, which gets the permissions of the old. UserError: an OSError (disk
    full, no permission), or place_of_file refuses the path.
    """
    place = place_of_file(path)
    temporary = temporary_name(place)  # not from tempfile, whose files only their owner can read
    with file_errors(path, CANNOT_WRITE):
        try:
            with new_file(temporary) as file:
                yield file
            _take_place(temporary, place)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_in(folder: Path):
    """Create a folder to fill. If the block succeeds, each file in it replaces its name in `folder`, as in `replacing`.

    For libraries that open files themselves, and for files that must be replaced together. Creates `folder` if missing.
    """
    folder = Path(folder)
    with file_errors(folder, "cannot write there: choose a folder that is writable and has room"):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(folder / "files")
        temporary.mkdir()
        try:
            yield temporary
            places = {path: place_of_file(folder / path.name) for path in sorted(temporary.iterdir())}
            for path, place in places.items():
                beside = path if place.parent == folder else temporary_name(place)
                if beside != path:
                    shutil.move(path, beside)  # a link's target may be on another disk
                _take_place(beside, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value) -> None:
    """Write the value as indented JSON, by `replacing`."""
    with replacing(path) as file:
        file.write(f"{as_json(value, indent=1)}\n".encode())


def place_of_file(path: Path) -> Path:
    """Return where to write a file named `path`: there, or at the target of a link.

    UserError: no regular file, a broken link, this program's own output, or the file or its folder is protected.
    """
    path = Path(path)
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    with file_errors(path, CANNOT_WRITE):
        try:
            found = path.stat()
        except FileNotFoundError:
            found = None
            if path.is_symlink():
                raise UserError(f"{path}: a link to {place}, where nothing is: remove it, or choose another") from None
            if not place.parent.is_dir():
                raise
    if found and not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise UserError(f"{path}: {kind}, expected a regular file or a new name: choose another")
    if found and (not place.exists() or _is_own_output(found)):
        raise UserError(f"{path}: this program's own output, expected a separate file: choose another")
    if not os.access(place.parent, os.W_OK | os.X_OK) or (found and not os.access(place, os.W_OK)):
        raise UserError(f"{path}: Permission denied: {CANNOT_WRITE}")
    return place


def _is_own_output(found: os.stat_result) -> bool:
    """Return whether standard output or error goes to this file, as /dev/stdout does with `> FILE`."""
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError, AttributeError):  # closed or missing
            if os.path.samestat(found, os.fstat(stream.fileno())):
                return True
    return False


def _take_place(new: Path, place: Path) -> None:
    """Rename a file to `place`, with owner and permissions of the file that it replaces, if any."""
    with suppress(FileNotFoundError):
        old = place.stat()
        with suppress(PermissionError):  # only root may change the owner
            os.chown(new, old.st_uid, old.st_gid)
        os.chmod(new, stat.S_IMODE(old.st_mode))
    os.replace(new, place)


@contextmanager
def new_folder(path: Path):
    """Create a folder to fill. It gets its name if the block succeeds, and is removed otherwise.

    UserError: it cannot be written, or something other than an empty folder, or a link to one, has that name.
    """
    path = Path(path)
    place = Path(os.path.realpath(path))
    with file_errors(path, "cannot write it: choose a place that exists, is writable and has room"):
        if os.path.lexists(path) and not (place.is_dir() and not any(place.iterdir())):
            raise UserError(f"{path}: exists already, expected the name of a new folder: choose another, or remove it")
        temporary = temporary_name(place)
        temporary.mkdir()
        try:
            yield temporary
            temporary.rename(place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def as_json(value, indent: int | None = None, default=None) -> str:
    """Return the value as JSON, with null for nan and infinity. default: as in json.dumps."""
    return json.dumps(_with_null(value), indent=indent, default=default, allow_nan=False)


def _with_null(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _with_null(one) for name, one in value.items()}
    return [_with_null(one) for one in value] if isinstance(value, list | tuple) else value


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk: this makes the names of its files durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
