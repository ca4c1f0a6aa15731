"""What is installed and how ranks are started: packages, MPI, caches; whether they fit each other."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from dist.mpi import INSTALL as INSTALL_MPI
from dist.mpi import what_is_missing
from dist.probe.programs import LOCAL_RANKS, is_first, mpi_family
from scripts.checkup.facts import installed, variables
from scripts.checkup.findings import FAIL, NOTE, SLOW, Finding, Ranks, fact, listed
from scripts.machine.host import machine, versions
from scripts.machine.launcher import find_launcher, find_mpiruns

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("gpt2", "dist", "strategies", "traces", "scripts")
REQUIRED = ("mpi4py", "numpy", "numba", "threadpoolctl", "tiktoken")  # to train at all
OPTIONAL = ("gpt2-mpi", "matplotlib", "ml_dtypes")
MUST_AGREE = {"mpi4py", "gpt2-mpi"}
LIBRARY_SECTIONS = (
    "software",
    "BLAS",
    "BLAS kernels",
    "numba's cache",
    "tokenizer",
    "measuring",
)  # import what training imports
LAUNCH_VARIABLES = (
    "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_MPI_TYPE", "SLURM_JOB_NODELIST",
)  # fmt: skip
INSTALL = "pip install -e . in the environment that every rank runs in"


def software() -> dict:
    """Versions, None of what is not installed; `source`: a hash of the project's files, on a node's first rank."""
    found = {name: installed(name) for name in (*REQUIRED, *OPTIONAL)}
    on_path = str(ROOT) in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        "versions": versions() | found,
        "interpreter": sys.executable,
        "installed": found["gpt2-mpi"] is not None or on_path,
        "source": source_hash() if is_first(LOCAL_RANKS) else None,
        **machine(),
    }


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
    """What started this process, what it left in the environment, and which mpirun and srun are found."""
    mpiruns = find_mpiruns() if is_first(LOCAL_RANKS) else []
    found = {"kind": find_launcher(), "variables": variables(*LAUNCH_VARIABLES), "mpiruns": mpiruns}
    return found | {"srun": shutil.which("srun")}


def numba_cache() -> dict:
    """{"folder": where compiled loops are kept, None if nowhere: numba has tried to write there}. UserError where it
    does not compile."""
    from gpt2.kernels import check_compiles

    check_compiles()
    from gpt2.kernels.numpy import loops

    caches = [loop._cache for loop in vars(loops).values() if hasattr(loop, "_cache")]
    return {"folder": getattr(caches[0], "cache_path", None)}


def tokenizer() -> dict:
    """Where tiktoken looks for GPT-2's files, and {file: the name it has there} of those that are missing."""
    from gpt2.data.tokenizers import GPT2_FILES, cache_folder

    folder = cache_folder()
    missing = {name: key for name, key in GPT2_FILES.items() if not folder or not (folder / key).is_file()}
    return {"folder": folder and str(folder), "missing": missing}


SECTIONS = {
    "software": software, "MPI": mpi, "launcher": launcher, "numba's cache": numba_cache, "tokenizer": tokenizer,
}  # fmt: skip


def foreign_launcher(kind: str, family: str | None, environment) -> str | None:
    """Why the library may end this process when it starts, if the launcher's way is not its own; or None."""
    launcher = mpi_family(kind)
    if None not in (launcher, family) and launcher != family:
        return f"mpirun is {launcher}'s, and mpi4py has {family}; start with {family}'s mpirun"
    if kind == "srun" and family == "MPICH" and "PMIX_RANK" in environment:
        return "srun offers PMIx, and mpi4py has MPICH, most builds of which know PMI only; start with srun --mpi=pmi2"
    return None


def launch(ranks, model):
    """Ranks that do not know each other, or no MPI; a doctor that was not started as training will be."""
    for problem in ranks.values("lost")[:1]:
        # dist.world.lost_ranks ends its line with what to do, after a semicolon or a colon.
        text, _, fix = problem.partition("; " if "; " in problem else ": ")
        yield Finding(FAIL, "launch", text, fix)
    if without := ranks.where("errors/MPI"):
        text = f"mpi4py does not work on {without.names}: {without[0]['errors']['MPI']}"
        yield Finding(FAIL, "MPI", text, what_is_missing()[1])
    alone = ranks.where("place/size", lambda size: size == 1)
    if alone.where("launcher", lambda found: not (found["mpiruns"] or found["srun"])):
        yield Finding(NOTE, "launch", f"neither mpirun nor srun is found on {alone.hosts}", INSTALL_MPI)
    if alone.where("launcher/kind", lambda kind: "batch script" in kind):
        text = "this is the batch script's own process: it sees one host of the allocation"
        yield Finding(NOTE, "launch", text, "start it as the training is started: srun python scripts/doctor.py")
    if limited := ranks.where("MPI/thread_level", lambda level: level != "MULTIPLE"):
        level = limited[0]["MPI"]["thread_level"]
        text = f"MPI allows {level} threads only: --end-on-stall aborts from a thread of its own"
        yield Finding(NOTE, "MPI", text, "use an MPI library built for MPI_THREAD_MULTIPLE")


def other_mpirun(ranks, model):
    """The mpirun that a user would type is of another MPI than mpi4py's."""
    mpiruns, family = fact(ranks[0], "launcher/mpiruns") or [], fact(ranks[0], "MPI/family")
    typed = next((run for run in mpiruns if run["where"] == "on PATH"), None)
    if typed and family and typed["family"] not in (None, family):
        own = next((run["path"] for run in mpiruns if run["family"] == family), None)
        text = (
            f"mpirun on PATH is {typed['family']}'s ({typed['path']}), and mpi4py has {ranks[0]['MPI']['library']}: "
            "that mpirun starts N worlds of 1 rank"
        )
        fix = f"start with {own}" if own else f"load {family}'s module, or reinstall mpi4py with {typed['family']}'s"
        yield Finding(NOTE if ranks[0]["place"]["size"] > 1 else FAIL, "mpirun", text, fix)


def packages(ranks, model):
    """Of those that training needs; of mpi4py launch() speaks."""
    for package in REQUIRED[1:]:
        if without := ranks.where("software/versions", lambda found, package=package: not found.get(package)):
            yield Finding(FAIL, "packages", f"{package} is not installed for {without.names}", INSTALL)
    if outside := ranks.where("software/installed", lambda is_installed: not is_installed):
        yield Finding(FAIL, "packages", f"this project is not installed for {outside.names}", INSTALL)


def unreadable(ranks, model):
    """Sections that could not be looked at; a library that does not import stops training as well."""
    for section in dict.fromkeys(name for facts in ranks for name in facts["errors"] if name != "MPI"):
        some = Ranks(facts for facts in ranks.where(f"errors/{section}") if not _is_missing(facts, section))
        if not some:
            continue
        why, of_library = some[0]["errors"][section], section in LIBRARY_SECTIONS
        severity, fix = NOTE, "run scripts/doctor.py alone on that host"
        if "no answer" in why and of_library:
            severity = SLOW
            fix = "imports read thousands of small files: keep the environment on each node's own disk, or in an image"
        elif "no answer" in why:
            severity, fix = FAIL, "find out what hangs there: a file system, a driver, a tool"
        elif of_library and why.startswith(("ImportError", "ModuleNotFoundError", "OSError")):
            severity, fix = FAIL, INSTALL
        elif of_library and why.startswith("UserError"):
            severity, fix = FAIL, why.rpartition(": ")[2]  # our errors end with what to do
        yield Finding(severity, section, f"{section} could not be looked at on {some.names}: {why}", fix)


def _is_missing(facts: dict, section: str) -> bool:
    """Whether it failed for want of a package that another finding names."""
    versions = fact(facts, "software/versions") or {}
    names = (name for name in REQUIRED if not versions.get(name))
    return facts["errors"][section].endswith(tuple(f"No module named '{name}'" for name in names))


def different_versions(ranks, model):
    """Of the same program, library or interpreter on different ranks: the first kind makes ranks miss each other."""
    for name, path in (("this project", "software/source"), ("the MPI library", "MPI/library")):
        if text := ranks.difference(path):
            fix = "let all nodes run one copy, from a shared file system or the same image"
            yield Finding(FAIL, "versions", f"{name} differs between nodes: {text}", fix)
    for package in dict.fromkeys(name for found in ranks.values("software/versions") for name in found):
        if text := ranks.difference(f"software/versions/{package}"):
            fix = "use one environment on all nodes; results differ in their last bits otherwise"
            severity = FAIL if package in MUST_AGREE else NOTE
            yield Finding(severity, "versions", f"{package} differs between nodes: {text}", fix)


def caches(ranks, model):
    """What every process would compile or fetch again."""
    if without := ranks.where("numba's cache", lambda cache: cache["folder"] is None):
        text = f"numba can write no cache on {without.hosts}: every process compiles the kernels again at its start"
        yield Finding(SLOW, "numba", text, "export NUMBA_CACHE_DIR=FOLDER, one that every rank can write")
    if without := ranks.where("tokenizer/missing", bool):
        missing, folder = without[0]["tokenizer"]["missing"], without[0]["tokenizer"]["folder"]
        text = (
            f"--tokenizer gpt2 would need the network on {without.hosts}: {listed(list(missing))} not in "
            f"{folder or 'any cache folder (TIKTOKEN_CACHE_DIR is empty)'}"
        )
        files = listed([f"{name} as {key}" for name, key in missing.items()])
        fix = f"export TIKTOKEN_CACHE_DIR=FOLDER, one that all nodes see and that holds {files}; or --tokenizer bytes"
        yield Finding(NOTE, "tokenizer", text, fix)


CHECKS = (launch, packages, unreadable, different_versions, other_mpirun, caches)
