"""What is installed and how ranks are started: packages, MPI, BLAS, caches; whether they fit each other."""

import hashlib
import os
import sys
from pathlib import Path

from dist.mpi import what_is_missing
from dist.probe.programs import LOCAL_RANKS, is_first, mpi_family
from scripts.checkup.facts import installed
from scripts.checkup.findings import FAIL, NOTE, SLOW, Finding, fact, plural
from scripts.machine.blas import FORCED, blas_facts, blas_text, unused_instructions
from scripts.machine.host import versions
from scripts.machine.launcher import find_launcher, find_mpiruns

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("gpt2", "dist", "strategies", "traces", "scripts")
REQUIRED = ("mpi4py", "numpy", "numba", "threadpoolctl", "tiktoken")  # to train at all
MUST_AGREE = {
    "this project": "software/source",
    "the MPI library": "MPI/library",
    "mpi4py": "software/versions/mpi4py",
}
LIBRARY_SECTIONS = ("software", "BLAS", "measuring")  # they import what training imports
INSTALL = "pip install -e . in the environment that every rank runs in"


def software() -> dict:
    """Return versions, None of what is not installed, and on a node's first rank `source`, a hash of the project."""
    return {
        "versions": versions() | {name: installed(name) for name in (*REQUIRED, "gpt2-mpi")},
        "interpreter": sys.executable,
        "source": source_hash() if is_first(LOCAL_RANKS) else None,
    }


def source_hash(root: Path = ROOT) -> str:
    """Return eight hexadecimal digits that differ where a source file of the project does."""
    digest = hashlib.sha1(usedforsecurity=False)
    for folder in SOURCES:
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def mpi() -> dict:
    """Describe the library that mpi4py has found. ImportError or RuntimeError where there is none."""
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)  # it starts once nothing else can fail
    from mpi4py import MPI

    from dist.world import library_name

    return {"library": library_name(), "family": mpi_family(MPI.Get_library_version())}


def launcher() -> dict:
    """Say what started this process, and on a node's first rank which mpiruns are found."""
    return {"kind": find_launcher(), "mpiruns": find_mpiruns() if is_first(LOCAL_RANKS) else []}


def blas() -> dict:
    """Describe NumPy's BLAS: its kernels, the wider instructions they leave out, the threads that cannot be held."""
    from threadpoolctl import threadpool_info

    from gpt2.kernels.numpy.cores import Cores

    facts = blas_facts(os.environ)
    Cores(1)  # holds BLAS to one thread, as training does
    threads = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    return facts | {"text": blas_text(facts), "unused": unused_instructions(facts), "threads": max(threads, default=1)}


SECTIONS = {"software": software, "MPI": mpi, "launcher": launcher, "BLAS": blas}


def foreign_launcher(kind: str, family: str | None, environment) -> str | None:
    """Say why the library may end this process when it starts, if another MPI's launcher started it; or None."""
    launcher = mpi_family(kind)
    if None not in (launcher, family) and launcher != family:
        return f"mpirun is {launcher}'s, and mpi4py has {family}; start with {family}'s mpirun"
    if kind == "srun" and family == "MPICH" and "PMIX_RANK" in environment:
        return "srun offers PMIx, and mpi4py has MPICH, most builds of which know PMI only; start with srun --mpi=pmi2"
    return None


def launch(ranks, model):
    """Find ranks that do not know each other, and ranks without MPI."""
    for problem in ranks.values("lost")[:1]:
        # dist.world.lost_ranks ends its line with what to do, after a semicolon or a colon.
        text, _, fix = problem.partition("; " if "; " in problem else ": ")
        yield Finding(FAIL, "launch", text, fix)
    if without := ranks.where("errors/MPI"):
        text = f"mpi4py does not work on {without.names}: {without[0]['errors']['MPI']}"
        yield Finding(FAIL, "MPI", text, what_is_missing()[1])


def other_mpirun(ranks, model):
    """Find an mpirun on PATH that is of another MPI than mpi4py's."""
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
    """Find packages that training needs and that are missing; launch() looks at mpi4py."""
    for package in REQUIRED[1:]:
        if without := ranks.where("software/versions", lambda found, package=package: not found.get(package)):
            yield Finding(FAIL, "packages", f"{package} is not installed for {without.names}", INSTALL)


def unreadable(ranks, model):
    """Find sections that could not be looked at; a library that does not import stops training as well."""
    for section in dict.fromkeys(name for facts in ranks for name in facts["errors"] if name != "MPI"):
        some = ranks.where(f"errors/{section}")
        why = some[0]["errors"][section]
        severity, fix = NOTE, "run scripts/doctor.py alone on that host"
        if "no answer" in why:
            severity, fix = FAIL, "find out what hangs there: a file system, a driver, a tool"
        elif section in LIBRARY_SECTIONS and why.startswith(("ImportError", "ModuleNotFoundError", "OSError")):
            severity, fix = FAIL, INSTALL
        yield Finding(severity, section, f"{section} could not be looked at on {some.names}: {why}", fix)


def different_versions(ranks, model):
    """Find nodes that run another copy of the project, or another MPI: their ranks miss each other."""
    for name, path in MUST_AGREE.items():
        if text := ranks.difference(path):
            fix = "let all nodes run one copy, from a shared file system or the same image"
            yield Finding(FAIL, "versions", f"{name} differs between nodes: {text}", fix)


def slow_blas(ranks, model):
    """Find BLAS threads that nobody can hold, and kernels narrower than the CPU's instructions."""
    if free := ranks.where("BLAS/threads", lambda threads: threads > 1):
        count = plural(free[0]["BLAS"]["threads"], "thread")
        text = f"{free[0]['BLAS']['text']} keeps {count} in each of {free.names}, beside the kernels' own"
        fix = "export OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_NUM_THREADS=1, or use a NumPy from PyPI"
        yield Finding(SLOW, "BLAS", text, fix)
    for same in ranks.where("BLAS/unused").holders("BLAS/text").values():
        found = same[0]["BLAS"]
        fix = f"unset {FORCED}" if FORCED in found["variables"] else "install a newer NumPy"
        yield Finding(SLOW, "BLAS", f"{found['text']}, on {same.hosts}: matrix products are slower than need be", fix)


CHECKS = (launch, packages, unreadable, different_versions, other_mpirun, slow_blas)
