"""NumPy's BLAS: whether its threads can be held, and whether its kernels fit this CPU."""

import os

from scripts.checkup.findings import NOTE, SLOW, Finding, fact, plural
from scripts.machine.blas import FORCED, blas_facts, blas_text, unused_instructions

ONE_BLAS_THREAD = "export OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_NUM_THREADS=1, or use a NumPy from PyPI"


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
    """Return which kernels multiply: blas_facts with "text" and "unused", the wider instructions they leave out."""
    facts = blas_facts(os.environ)
    return facts | {"text": blas_text(facts), "unused": unused_instructions(facts)}


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
    """Kernels narrower than the CPU: forced by a variable, or picked by an OpenBLAS that does not know this CPU."""
    for same in ranks.where("BLAS kernels/unused", bool).holders("BLAS kernels/text").values():
        found = same.values("BLAS kernels")[0]
        fix = f"unset {FORCED}" if FORCED in found["variables"] else "install a newer NumPy"
        yield Finding(SLOW, "BLAS", f"{found['text']}, on {same.hosts}: matrix products are slower than need be", fix)


def unlike_kernels(ranks, model):
    if text := ranks.difference("BLAS kernels/kernels"):
        fix = f"{FORCED}=NAME with one that all CPUs can run, if the last bits must agree; or one kind of node"
        yield Finding(NOTE, "BLAS", f"the BLAS kernels differ between nodes: {text}", fix)


CHECKS = (threads, slow_kernels, unlike_kernels)
