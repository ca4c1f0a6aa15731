"""Files and folders that are there whole or not at all, whenever the writer is interrupted.

They take the place of regular files only, or of nothing. A link to a regular file stays: what it points to is replaced.
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

TEMPORARY = ".*.tmp"  # matches what is being written and has not got its name yet
CANNOT_WRITE = "cannot write it: choose a folder that exists, is writable and has room"
LOOK_S = 0.005  # between two looks whether a lock is free
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def regular(path, flags: int) -> int:
    """An opener, as open() takes one, that opens no pipe and no device: such a one may wait for ever for its writer."""
    refusal = OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise refusal if error.errno == errno.ENXIO else error from None  # a pipe without a reader, a socket
    if not stat.S_ISREG(mode := os.fstat(handle).st_mode) and not stat.S_ISDIR(mode):  # of a folder open() complains
        os.close(handle)
        raise refusal
    return handle


def read_bytes(path) -> bytes:
    """Of a regular file. OSError: it is none, or cannot be read."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def user_cache_folder() -> Path | None:
    """Where this user's programs keep what they would otherwise make again; made where missing. Anybody may empty it.

    In XDG_CACHE_HOME, or ~/.cache (the XDG Base Directory Specification); where that cannot be written, in the
    machine's folder for temporary files; None where that cannot be written either.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache, "gpt2-mpi")
    return folder if _can_keep(folder) else machine_folder()


def machine_folder() -> Path | None:
    """A folder of this user that no other machine sees, made where missing: among the temporary files. None where they
    cannot be written."""
    place = temporary_files()
    folder = place and place / f"gpt2-mpi-{os.getuid()}"
    return folder if folder and _can_keep(folder) else None


def temporary_files() -> Path | None:
    """The machine's folder for temporary files; None where none can be written, as all are full or read-only."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return None


def _can_keep(folder: Path) -> bool:
    """Whether files can be written there: tried, as root may write everywhere but to a disk that is read-only."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            # Anybody may have made a folder of that name among the temporary files, or a link to one of this user's.
            return folder.lstat().st_uid == os.getuid() or folder.parent != temporary_files()
    except OSError:
        return False


@contextmanager
def alone(lock: Path, wait_s: float):
    """The block alone among the processes of a machine that come here with this file, which is made where missing.

    The lock ends with its process. At the latest after wait_s seconds the block begins anyway.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            file, end = stack.enter_context(open(lock, "w")), time.monotonic() + wait_s
            while not _take(file) and time.monotonic() < end:
                time.sleep(LOOK_S)
        yield


def _take(file) -> bool:
    """Whether waiting has an end: the lock is this process's, or the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def temporary_name(path: Path) -> Path:
    """A name beside `path` that nobody else uses, also on another node that shares the disk."""
    return path.with_name(f".{uuid.uuid4().hex}.tmp")


@contextmanager
def new_file(path: Path):
    """A new binary file, on disk when the block ends well. OSError: it exists, or cannot be written."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path):
    """A binary file to write. It takes the place of `path` when the block ends well, and disappears otherwise.

    Readers see the old file or the whole new one, which has the old one's permissions. An OSError (disk full, no
    permission) becomes a UserError, as what place_of_file refuses.
    """
    place = place_of_file(path)
    temporary = temporary_name(place)  # not tempfile's: only their owner may read those
    with file_errors(path, CANNOT_WRITE):
        try:
            with new_file(temporary) as file:
                yield file
            _take_place(temporary, place)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_in(folder: Path):
    """A folder to fill with files. Each takes the place of its name in `folder`, as with `replacing`, when the block
    ends well.

    `folder` is made where missing. For writers who open their files themselves, and for files that belong together.
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
                    shutil.move(path, beside)  # a link's target may lie on another disk
                _take_place(beside, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value) -> None:
    """The value as indented JSON, by `replacing`. UserError."""
    with replacing(path) as file:
        file.write(f"{as_json(value, indent=1)}\n".encode())


def place_of_file(path: Path) -> Path:
    """Where a file is written that gets the name `path`: there, or where the link of that name leads.

    UserError: nothing may be written there, as it is no regular file, leads nowhere, is this program's own output, is
    protected, or lies in no folder that can be written.
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
        raise UserError(f"{path}: this program's own output, expected a file of its own: choose another")
    if not os.access(place.parent, os.W_OK | os.X_OK) or (found and not os.access(place, os.W_OK)):
        raise UserError(f"{path}: Permission denied: {CANNOT_WRITE}")
    return place


def _is_own_output(found: os.stat_result) -> bool:
    """Whether it is the file to which standard output or error goes, as /dev/stdout behind `> FILE`."""
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            if os.path.samestat(found, os.fstat(stream.fileno())):
                return True
    return False


def _take_place(new: Path, place: Path) -> None:
    """Rename a file to a name whose file, if there is one, it replaces, with that one's owner and permissions."""
    with suppress(FileNotFoundError):
        old = place.stat()
        with suppress(PermissionError):  # only root may give a file away
            os.chown(new, old.st_uid, old.st_gid)
        os.chmod(new, stat.S_IMODE(old.st_mode))
    os.replace(new, place)


@contextmanager
def new_folder(path: Path):
    """A folder to fill. It gets its name when the block ends well, and disappears otherwise.

    UserError: something of that name exists already, other than an empty folder or a link to one, or it cannot be
    written.
    """
    path, place = Path(path), Path(os.path.realpath(path))
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
    """The value as JSON. A number that JSON has no word for, nan or infinite, becomes null. default: as json.dumps'."""
    return json.dumps(_with_null(value), indent=indent, default=default, allow_nan=False)


def _with_null(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _with_null(one) for name, one in value.items()}
    return [_with_null(one) for one in value] if isinstance(value, list | tuple) else value


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk: a file's name is there only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
