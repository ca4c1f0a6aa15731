"""Files and folders that are there whole or not at all, whenever the writer is interrupted."""

import errno
import json
import math
import os
import shutil
import stat
import uuid
from contextlib import contextmanager
from pathlib import Path

from gpt2.errors import UserError, file_errors

TEMPORARY = ".*.tmp"  # matches what is being written and has not got its name yet


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

    Readers see the old file or the whole new one. An OSError (disk full, no permission) becomes a UserError.
    """
    path = Path(path)
    temporary = temporary_name(path)  # not tempfile's: only their owner may read those
    with file_errors(path, "cannot write it: choose a folder that exists, is writable and has room"):
        try:
            with new_file(temporary) as file:
                yield file
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path):
    """A folder to fill. It gets its name when the block ends well, and disappears otherwise.

    UserError: something of that name exists already, other than an empty folder, or it cannot be written.
    """
    path = Path(os.path.abspath(path))
    with file_errors(path, "cannot write it: choose a place that exists, is writable and has room"):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"{path}: exists already, expected the name of a new folder: choose another, or remove it")
        temporary = temporary_name(path)
        temporary.mkdir()
        try:
            yield temporary
            temporary.rename(path)
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
