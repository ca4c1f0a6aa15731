"""NumPy's BLAS: whether its threads can be held, and whether its kernels are the fastest that this CPU can run."""

import os

from dist.probe.programs import LOCAL_RANKS, is_first
from scripts.checkup.findings import NOTE, SLOW, Finding, fact, plural
from scripts.machine.blas import BEST, VARIABLES, blas_facts, blas_text
from scripts.machine.blas_choice import FLAG, against_best

ONE_BLAS_THREAD = "export OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_NUM_THREADS=1, or use a NumPy from PyPI"
SLOWER = 1.1  # what the kernels as they are set may take longer by


def libraries() -> list[dict]:
    """NumPy's BLAS libraries: threads before and after this project has held them to one, as its kernels do."""
    import numpy  # noqa: F401 - loads its BLAS
    from threadpoolctl import threadpool_info

    from gpt2.kernels.numpy.cores import Cores

    found = {library["filepath"]: library for library in threadpool_info() if library["user_api"] == "blas"}
    Cores(1)
    held = {library["filepath"]: library["num_threads"] for library in threadpool_info()}
    keys = {"name": "internal_api", "version": "version", "threads": "num_threads"}
    return [
        {name: library[key] for name, key in keys.items()} | {"held_to": held.get(path)}
        for path, library in found.items()
    ]


def kernels() -> dict:
    """Which kernels multiply, as blas_facts, with `text`; `trial`, on a node's first rank: what others would gain."""
    facts = blas_facts(os.environ)
    return facts | {"text": blas_text(facts), "trial": against_best(facts) if is_first(LOCAL_RANKS) else None}


SECTIONS = {"BLAS": libraries, "BLAS kernels": kernels}


def threads(ranks, model):
    """BLAS threads that nobody can hold: they spin on the cores of other ranks and of the work between products."""
    if unknown := ranks.where("BLAS", lambda libraries: not libraries):
        text = f"NumPy's BLAS is unknown on {unknown.hosts}: it cannot be held to one thread and may oversubscribe"
        yield Finding(SLOW, "BLAS", text, ONE_BLAS_THREAD)
    for members in ranks.nodes:
        free = [library for libraries in members.values("BLAS") for library in libraries if library["held_to"] != 1]
        if free:
            count, some = plural(free[0]["threads"], "thread"), plural(len(free), "rank")
            cores = plural(len(fact(members[0], "cores/affinity") or []), "core")
            text = f"{free[0]['name']} keeps {count} in each of {some} on {members.hosts}, of {cores}"
            yield Finding(SLOW, "BLAS", text, ONE_BLAS_THREAD)


def slow_kernels(ranks, model):
    """Kernels that a variable forces, or that OpenBLAS takes on a CPU that it does not know, far from the fastest."""
    slow = ranks.where("BLAS kernels/trial", lambda trial: _ratio(trial) > SLOWER)
    for same in slow.holders("BLAS kernels/text").values():
        own = max(same.values("BLAS kernels"), key=lambda found: _ratio(found["trial"]))
        trial, name = own["trial"], own["trial"]["name"]
        text = (
            f"{own['text']} on {same.hosts}: matrix products take {_ratio(trial):.1f} times as long as by "
            f"{trial['kernels']} kernels ({trial['as_set'] / 1e9:.3g} of {trial['flops'] / 1e9:.3g} GFLOP/s a core)"
        )
        forced = [variable for variable in VARIABLES if variable in own["variables"]]
        fix = f"unset {' '.join(forced)}, or start" if forced and name is None else "start"
        yield Finding(SLOW, "BLAS", text, f"{fix} training with {FLAG} {BEST}")


def _ratio(trial: dict) -> float:
    """How much longer products take as things are set than by the best kernels."""
    return trial["flops"] / trial["as_set"] if trial["flops"] and trial["as_set"] else 1.0


def unlike_kernels(ranks, model):
    if text := ranks.difference("BLAS kernels/kernels"):
        fix = f"{FLAG} NAME with one that all CPUs can run, if the last bits are to agree; or ask for one kind of node"
        yield Finding(NOTE, "BLAS", f"the BLAS kernels differ between nodes: {text}", fix)


CHECKS = (threads, slow_kernels, unlike_kernels)
