"""--blas-kernels: which of OpenBLAS's kernels a program computes with. Chosen before NumPy is there, checked after.

NumPy loads its BLAS when it is imported, and that takes its kernels by what the environment says then. So a program
calls `choose` first of all, before it imports what imports NumPy; neither does this file, nor what it imports. A
mistake in the flag is told later, by `check`, where a job can speak with one voice.

The best kernels are found by trial (blas_trial.py), once for each kind of CPU, NumPy and OpenBLAS: kept.py keeps them.
"""

import os
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from gpt2.errors import UserError
from scripts.machine import kept
from scripts.machine.blas import AS_SET, BEST, CORE_TYPE, L2_SIZE, TRIED, check_name, cpu_words, loaded_blas, runnable
from scripts.machine.blas_trial import try_all
from scripts.machine.host import processor, version_of

FLAG = "--blas-kernels"
METAVAR = f"{AS_SET}|{BEST}|NAME"
HELP = "kernels of NumPy's OpenBLAS: as the environment has it, the fastest by a trial, or by their name"
KEPT = "blas-kernels"
OWN = "own"  # in a trial: those that OpenBLAS takes by itself
MORE_ROUNDS = 5  # for a finding, or a second look: other ranks may be busy beside it
GAIN = 1.05  # what is faster by less may be so by chance, and would let ranks differ
_chosen = AS_SET  # what this process's environment was set for


def choose(arguments: list[str]) -> None:
    """Set the environment to what the flag on a command line asks for, if it can be had."""
    global _chosen
    asked = asked_for(arguments)
    if asked == AS_SET or "numpy" in sys.modules or find_spec("numpy") is None:
        return
    try:
        set_kernels(os.environ, best_kernels()["name"] if asked == BEST else check_name(asked))
    except UserError:
        return
    _chosen = asked


def asked_for(arguments: list[str]) -> str:
    """The flag's value on a command line, of several the last, as argparse takes it."""
    asked = AS_SET
    for word, after in pairwise([*arguments, AS_SET]):
        if word == FLAG:
            asked = after
        elif word.startswith(f"{FLAG}="):
            asked = word.partition("=")[2]
    return asked


def check(asked: str) -> None:
    """UserError unless this process computes with the kernels that the flag asks for."""
    if asked == AS_SET:
        return
    name = asked if asked == BEST else check_name(asked)
    loaded = loaded_blas()
    if asked == BEST and _chosen == BEST:
        forget_best(loaded["version"])
    is_there = asked == _chosen or (loaded["kernels"] or "").lower() == name.lower()
    if not is_there and loaded["library"] == "openblas":
        raise UserError(
            f"{FLAG} {asked}: NumPy is loaded already, with {loaded['kernels']} kernels: set {CORE_TYPE} before Python "
            "starts"
        )


def set_kernels(environment, name: str | None) -> None:
    """From here on a process that starts with this environment has the kernels of that name; None: OpenBLAS's own."""
    for variable in (CORE_TYPE, L2_SIZE):
        environment.pop(variable, None)
    if name:
        environment[CORE_TYPE] = name


def best_kernels() -> dict:
    """The kernels that multiply fastest on this CPU, kept from an earlier trial or found by one.

    {"name": for OPENBLAS_CORETYPE, None for what OpenBLAS takes by itself, "kernels", "flops", "version": of what was
    tried, "tried": all of it, "seconds"}.
    """
    return kept.once(KEPT, trial_facts(), find_best, is_runnable)


def trial_facts() -> dict:
    """What the outcome of a trial depends on, as far as it can be known without NumPy."""
    package = Path(find_spec("numpy").origin).parent
    # Wheels bring their BLAS, in a folder beside NumPy's, under a name of its own for each build. Others are beside
    # Python, as conda's, whose files are named by their versions.
    folders = package.with_name("numpy.libs"), Path(sys.prefix, "lib")
    libraries = {str(path.resolve()) for folder in folders for path in folder.glob("lib*blas*")}
    return {
        "processor": processor(), "flags": sorted(cpu_words()), "numpy": version_of("numpy"), "place": str(package),
        "libraries": sorted(libraries),
    }  # fmt: skip


def is_runnable(answer: dict) -> bool:
    """Whether a kept answer names kernels that this CPU can run: one that it cannot would end the program."""
    return answer["name"] is None or answer["name"] in runnable(cpu_words())


def forget_best(loaded_version: str | None) -> None:
    """Drop the kept answer if it is of another BLAS than the one that is loaded: the next program tries again."""
    facts = trial_facts()
    path = kept.place_of(KEPT, facts)
    answer = kept.read(path, facts, is_runnable)
    if answer and answer["version"] != loaded_version:
        path.unlink(missing_ok=True)


def find_best() -> dict:
    """The trial of all that this CPU can run. See best_kernels.

    It is kept for good, so what wins over OpenBLAS's own choice has to win again: other work may have slowed that one.
    """
    begun, all_of_them = time.perf_counter(), environments()
    best = best_of(tried := try_all(all_of_them))
    if best["name"]:
        again = try_all({name: all_of_them[name] for name in (OWN, best["name"])}, MORE_ROUNDS)
        best = best_of(again) | {"tried": tried | again}
    return best | {"seconds": time.perf_counter() - begun}


def environments() -> dict[str, dict]:
    """For each name of a trial the environment of its process."""
    can = set(runnable(cpu_words()))
    return {name or OWN: environment_of(name) for name in (None, *(name for name in TRIED if name in can))}


def environment_of(name: str | None) -> dict[str, str]:
    """This process's environment, with what lets another have the kernels of that name."""
    environment = dict(os.environ)
    set_kernels(environment, name)
    return environment


def best_of(tried: dict[str, dict]) -> dict:
    """Of a trial's outcome the fastest, and OpenBLAS's own choice unless that is slower by GAIN."""
    rates = {name: one["flops"] for name, one in tried.items() if one["library"] == "openblas"}
    name = max(rates, key=rates.get, default=OWN)
    if OWN in rates and rates[name] < GAIN * rates[OWN]:
        name = OWN
    best = tried.get(name) or {"kernels": None, "version": None, "flops": None}
    return {
        "name": None if name == OWN else name,
        **{key: best[key] for key in ("kernels", "version", "flops")},
        "tried": tried,
    }


def against_best(loaded: dict) -> dict | None:
    """best_of a trial of this moment, and `as_set`: the rate of the kernels that this process has, measured beside it.

    None where BLAS is not OpenBLAS. loaded: as loaded_blas() has it.
    """
    if loaded["library"] != "openblas":
        return None
    tried = try_all(environments() | {AS_SET: dict(os.environ)}, MORE_ROUNDS)
    as_set = tried.pop(AS_SET, None) or next((one for one in tried.values() if one["kernels"] == loaded["kernels"]), {})
    return best_of(tried) | {"as_set": as_set.get("flops")}
