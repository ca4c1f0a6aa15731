"""Facts about what is installed: versions, MPI and its launchers, BLAS, numba's cache, the tokenizer's files."""

import hashlib
import importlib
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dist.probe.programs import mpi_family, tool_output
from scripts.checkup.facts import is_first_on_node, variables
from scripts.machine.host import machine, versions

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("gpt2", "dist", "strategies", "traces", "scripts")
REQUIRED = ("mpi4py", "numpy", "numba", "threadpoolctl", "tiktoken")  # to train at all
OPTIONAL = ("gpt2-mpi", "matplotlib", "ml_dtypes")
LAUNCH_VARIABLES = (
    "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_MPI_TYPE", "SLURM_JOB_NODELIST",
)  # fmt: skip
# The processes that start ranks; the nearest one above a rank is its launcher.
LAUNCHERS = {
    "hydra_pmi_proxy": "mpirun (MPICH's Hydra)",
    "prterun": "mpirun (Open MPI)",
    "prted": "mpirun (Open MPI)",
    "orterun": "mpirun (Open MPI)",
    "orted": "mpirun (Open MPI)",
    "slurmstepd": "srun",
}


def sections() -> dict:
    return {
        "software": software,
        "MPI": mpi,
        "launcher": launcher,
        "BLAS": blas,
        "numba's cache": numba_cache,
        "tokenizer": tokenizer,
    }


def software() -> dict:
    """Versions, None of what is not installed; `source`: a hash of the project's files, on a node's first rank."""
    return {
        "versions": versions() | {name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        "interpreter": sys.executable,
        "installed": _version("gpt2-mpi") is not None or str(ROOT) in _python_path(),
        "source": source_hash() if is_first_on_node(os.environ) else None,
        **machine(),
    }


def _python_path() -> list[str]:
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


def _version(package: str) -> str | None:
    """The installed version; of a package that was made available in another way, its own word."""
    try:
        return version(package)
    except PackageNotFoundError:
        try:
            return getattr(importlib.import_module(package), "__version__", "unknown")
        except ImportError:
            return None


def source_hash(root: Path = ROOT) -> str:
    """Eight hexadecimal digits that differ where a source file of the project does."""
    digest = hashlib.sha1(usedforsecurity=False)
    for folder in SOURCES:
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def mpi() -> dict:
    """The library that mpi4py has found. ImportError or RuntimeError where there is none."""
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)  # it starts once nothing else can fail
    from mpi4py import MPI

    from dist.world import library_name

    return {"library": library_name(), "family": mpi_family(MPI.Get_library_version()), "thread_level": None}


def launcher() -> dict:
    """What started this process, what the launcher left in its environment, and which mpirun and srun are found."""
    above = next((name for name in _processes_above() if name in LAUNCHERS), None)
    return {
        "kind": launcher_kind(above, os.environ),
        "variables": variables(*LAUNCH_VARIABLES),
        "mpiruns": _mpiruns() if is_first_on_node(os.environ) else [],
        "srun": shutil.which("srun"),
    }


def launcher_kind(above: str | None, environment) -> str:
    """In words; above: the nearest launcher process over this one, a key of LAUNCHERS, None if none is seen."""
    if above == "slurmstepd" and "SLURM_STEP_ID" not in environment:
        return "none, a batch script's own process"
    if above:
        return LAUNCHERS[above]
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return LAUNCHERS["prterun"]
    return "one that speaks PMI" if "PMI_SIZE" in environment else "none"


def _processes_above():
    """Names of this process's ancestors, nearest first; the kernel cuts them at 15 characters, titles at a colon."""
    process = os.getppid()
    while process > 1:
        try:
            fields = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return
        yield fields[fields.index("(") + 1 : fields.rindex(")")].split(":")[0]
        process = int(fields[fields.rindex(")") + 1 :].split()[1])


def _mpiruns() -> list[dict]:
    """{"path", "family", "version"} of the mpirun on PATH and of that beside this Python, "beside" saying which."""
    from dist.probe.programs import find_mpirun

    found = []
    for path, name in ((shutil.which("mpirun"), "on PATH"), (find_mpirun(), "beside this Python")):
        if path and not any(os.path.realpath(path) == os.path.realpath(other["path"]) for other in found):
            text = tool_output(path, "--version") or ""
            found.append({"path": path, "where": name, "family": mpi_family(text), "version": _version_in(text)})
    return found


def _version_in(text: str) -> str:
    """The first word that is a version number."""
    words = (word.strip("(),:") for word in text.split())
    return next((word for word in words if word[:1].isdigit() and "." in word), "version unknown")


def blas() -> list[dict]:
    """NumPy's BLAS libraries: threads before and after this project has held them to one, as its kernels do."""
    import numpy  # noqa: F401 - loads its BLAS
    from threadpoolctl import threadpool_info

    from gpt2.kernels.numpy.cores import Cores

    before = [library for library in threadpool_info() if library["user_api"] == "blas"]
    Cores(1)
    held = {library["filepath"]: library["num_threads"] for library in threadpool_info()}
    return [
        {
            "name": library["internal_api"],
            "version": library["version"],
            "threads": library["num_threads"],
            "held_to": held.get(library["filepath"]),
        }
        for library in before
    ]


def numba_cache() -> dict:
    """{"folder": where compiled loops are kept, None if nowhere}: numba has tried to write there."""
    from gpt2.kernels.numpy import loops

    caches = [loop._cache for loop in vars(loops).values() if hasattr(loop, "_cache")]
    return {"folder": getattr(caches[0], "cache_path", None)}


def tokenizer() -> dict:
    """Where tiktoken looks for GPT-2's files, and {file: the name it has there} of those that are missing."""
    from gpt2.data.tokenizers import GPT2_FILES, cache_folder

    folder = cache_folder()
    missing = {name: key for name, key in GPT2_FILES.items() if not folder or not (folder / key).is_file()}
    return {"folder": folder and str(folder), "missing": missing}
