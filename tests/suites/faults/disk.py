"""Small file systems that can be filled, as root."""

import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def own_disk(folder: Path, options: str = "size=8m", keep: object = False):
    """A file system of its own at `folder` while the block runs; hosts that are made in it see it.

    keep: what is on it stays as a folder of that name. It may have been unmounted meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        kept = folder.with_name(f"{folder.name}.kept")
        if keep:
            shutil.copytree(folder, kept)
        if folder.is_mount():
            subprocess.run(["umount", "--lazy", folder], check=True)
        if keep:
            folder.rmdir()
            kept.rename(folder)


def fill(folder: Path) -> None:
    """The disk that a folder is on, to the last byte."""
    try:
        with open(folder / "ballast", "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError:
        pass


def empty(folder: Path) -> None:
    """Make room again."""
    (folder / "ballast").unlink(missing_ok=True)
