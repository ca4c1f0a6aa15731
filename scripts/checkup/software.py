"""Check the installed packages, MPI, BLAS, and the launcher."""

import os
import re
import shutil
import sys
from importlib import import_module

from dist.mpi import what_is_missing
from dist.probe.programs import LOCAL_RANKS, find_mpirun, is_first, mpi_family, tool_output
from scripts.checkup.facts import fact
from scripts.checkup.report import FAIL, NOTE, SLOW, Problem
from scripts.machine.blas import FORCED, blas_facts, blas_text, unused_instructions
from scripts.machine.checkout import source_hash
from scripts.machine.host import versions

PACKAGES = ("numpy", "numba", "threadpoolctl", "tiktoken")  # required for training, besides mpi4py
MUST_AGREE = {
    "this project": "software/source",
    "the MPI library": "MPI/library",
    "mpi4py": "software/versions/mpi4py",
}
IMPORTING = ("packages", "BLAS")  # sections
INSTALL = "pip install -e . in the environment that every rank runs in"


def software() -> dict:
    """Return the installed versions and, on a node's first rank, `source`, a hash of the project."""
    return {
        "versions": versions("gpt2-mpi", "mpi4py", *PACKAGES),
        "interpreter": sys.executable,
        "source": source_hash() if is_first(LOCAL_RANKS) else None,
    }


def mpi() -> dict:
    """Describe the MPI library that mpi4py finds. Raise ImportError or RuntimeError if there is none."""
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)  # doctor.py starts MPI later, when nothing else can fail
    from mpi4py import MPI

    from dist.world import library_name

    return {"library": library_name(), "family": mpi_family(MPI.Get_library_version())}


def launcher() -> dict:
    """On a node's first rank, return the mpirun on PATH and, if different, the one beside this Python."""
    found = []
    places = ((shutil.which("mpirun"), "on PATH"), (find_mpirun(), "beside this Python"))
    for path, where in places if is_first(LOCAL_RANKS) else ():
        if path and not any(os.path.samefile(path, other["path"]) for other in found):
            text = tool_output(path, "--version") or ""
            number = re.search(r"\b\d+\.[^\s,()]+", text)
            version = number[0] if number else "version unknown"
            found.append({"path": path, "where": where, "family": mpi_family(text), "version": version})
    return {"mpiruns": found}


def packages() -> None:
    """Import the packages that training and the joint measurements need."""
    for name in (*PACKAGES, "scripts.checkup.together"):
        import_module(name)


def blas() -> dict:
    """Describe NumPy's BLAS: its kernels, and the CPU's widest instruction set if they do not use it."""
    facts = blas_facts(os.environ)
    return facts | {"text": blas_text(facts), "unused": unused_instructions(facts)}


SECTIONS = {"software": software, "MPI": mpi, "launcher": launcher, "packages": packages, "BLAS": blas}


def launch(ranks, model):
    """Find ranks that do not see each other, and ranks without MPI."""
    for problem in ranks.values("lost")[:1]:
        # The line from dist.world.lost_ranks ends with the advice, after a semicolon or a colon.
        text, _, fix = problem.partition("; " if "; " in problem else ": ")
        yield Problem(FAIL, "launch", text, fix)
    if without := ranks.where("errors/MPI"):
        text = f"mpi4py does not work on {without.names}: {without[0]['errors']['MPI']}"
        yield Problem(FAIL, "MPI", text, what_is_missing()[1])


def other_mpirun(ranks, model):
    """Find an mpirun on PATH that belongs to another MPI library than mpi4py uses."""
    mpiruns = fact(ranks[0], "launcher/mpiruns") or []
    family = fact(ranks[0], "MPI/family")
    typed = next((run for run in mpiruns if run["where"] == "on PATH"), None)
    if typed and family and typed["family"] not in (None, family):
        own = next((run["path"] for run in mpiruns if run["family"] == family), None)
        text = f"mpirun on PATH is {typed['family']}'s ({typed['path']}), and mpi4py has {ranks[0]['MPI']['library']}: "
        text += "that mpirun starts N worlds of 1 rank"
        fix = f"start with {own}" if own else f"load {family}'s module, or reinstall mpi4py with {typed['family']}'s"
        yield Problem(NOTE if ranks[0]["place"]["size"] > 1 else FAIL, "mpirun", text, fix)


def unreadable(ranks, model):
    """Find sections that failed. If a library cannot be imported, training will fail."""
    for section in dict.fromkeys(name for facts in ranks for name in facts["errors"] if name != "MPI"):
        some = ranks.where(f"errors/{section}")
        why = some[0]["errors"][section]
        severity = NOTE
        fix = "run scripts/doctor.py alone on that host"
        if section in IMPORTING and why.startswith(("ImportError", "ModuleNotFoundError", "OSError")):
            severity = FAIL
            fix = INSTALL
        yield Problem(severity, section, f"{section} could not be checked on {some.names}: {why}", fix)


def different_versions(ranks, model):
    """Find nodes with another version of the project, MPI or mpi4py: their ranks cannot work together."""
    for name, path in MUST_AGREE.items():
        holders = ranks.by_value(path)
        if len(holders) > 1:
            text = "; ".join(f"{value} on {some.hosts}" for value, some in holders.items())
            fix = "let all nodes run one copy, from a shared file system or the same image"
            yield Problem(FAIL, "versions", f"{name} differs between nodes: {text}", fix)


def slow_blas(ranks, model):
    """Find BLAS kernels that use narrower instructions than the CPU has."""
    for same in ranks.where("BLAS/unused").by_value("BLAS/text").values():
        found = same[0]["BLAS"]
        fix = f"unset {FORCED}" if FORCED in found["variables"] else "install a newer NumPy"
        yield Problem(SLOW, "BLAS", f"{found['text']}, on {same.hosts}: matrix products are slow", fix)


CHECKS = (launch, unreadable, different_versions, other_mpirun, slow_blas)
