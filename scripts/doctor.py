"""Describe this machine or allocation, and list what will fail or be slow in a training run, with fixes.

    python scripts/doctor.py                            this host alone
    mpirun -n 4 python scripts/doctor.py                the ranks, placed as in a training run
    srun --mpi=pmix -n 16 python scripts/doctor.py --expect-ranks 16 --model gpt2-124M --out $SCRATCH/runs

Start it exactly as you will start the training run. It prints facts, findings ("will fail", "will be slow", "note")
and a verdict. Exit code: 1 if something will fail, else 0. It takes seconds, at most --limit, even if a check hangs.
If MPICH aborts it under srun --mpi=pmi2 ("invalid client request"), export MPIR_CVAR_CH4_NETMOD=ofi.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

# Other programs need the project installed. This one runs from a bare checkout, to say what is missing.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dist.console import USER_MISTAKE, open_console, say
from dist.probe.programs import RANKS, is_first
from dist.shared_memory import remove_left_segments
from gpt2.config import PRESETS, preset_name
from gpt2.errors import UserError
from gpt2.files import as_json, place_of_file, write_json
from scripts.checkup import gpus, machine, network, software
from scripts.checkup.facts import TimeLimit, fact, gather, new_facts
from scripts.checkup.report import FAIL, as_text, find_problems, verdict
from scripts.settings.command_line import Parser

CHECKS = (*software.CHECKS, *machine.CHECKS, *network.CHECKS, *gpus.CHECKS)


def main():
    settings = parse()
    limit = TimeLimit(settings.limit)
    facts = new_facts()
    if settings.remove_segments and (removed := remove_left_segments()):
        say(f"removed {len(removed)} segments of killed jobs, {sum(size for _, size in removed) / 1e6:.1f} MB")
    # Before MPI starts, as some of these start processes.
    gather(facts, software.SECTIONS | machine.sections(settings.out) | gpus.SECTIONS, limit)
    if "MPI" in facts["errors"]:
        raise SystemExit(report([facts], settings, brief=not is_first(RANKS)))
    raise SystemExit(examine_together(facts, settings, limit))


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help="folder for your run folders (runs)")
    add("--model", type=preset_name, choices=PRESETS, help="check that this model fits into memory and disk")
    add("--expect-ranks", type=int, metavar="N", help="report a failure unless there are this many ranks")
    limit_help = "stop after this time, even if a check hangs (180)"
    add("--limit", type=float, default=180.0, metavar="SECONDS", help=limit_help)
    add("--json", nargs="?", const="-", metavar="FILE", help="write facts and findings to FILE, or standard output")
    add("--remove-segments", action="store_true", help="first remove what your killed jobs left in /dev/shm")
    settings = parser.parse_args()
    if settings.json not in (None, "-") and is_first(RANKS):
        try:
            place_of_file(Path(settings.json))  # now, as the measurements may take minutes
        except UserError as error:
            parser.end(str(error))
    return settings


def examine_together(facts: dict, settings, limit: TimeLimit) -> int:
    """Measure on all ranks and return the exit code.

    A rank records its errors as facts instead of raising them, so that all ranks make the same collective calls.
    """
    from mpi4py.MPI import COMM_TYPE_SHARED

    from dist.world import install_abort_hook, lost_ranks, start_mpi, world_of

    limit.stage = "starting MPI: does the launcher fit the library (srun --mpi=list), do the nodes reach each other?"
    comm = start_mpi()
    install_abort_hook(comm)
    if problem := lost_ranks(comm.size, settings.expect_ranks, os.environ):
        facts["lost"] = problem
        if comm.size == 1:  # each of the unconnected processes reports this
            return report([facts], settings, brief=True)
    limit.stage = "meeting the other ranks: one of them may have ended, or not be reachable"
    world = world_of(comm, comm.Split_type(COMM_TYPE_SHARED, key=comm.rank))
    sizes = {"size": world.size, "nodes": world.node_count, "local_size": world.local_size}
    facts["place"] = world.places[world.rank] | sizes
    gather(facts, {"own GPU": lambda: gpus.own_gpu(world.local_rank)}, limit)
    if all(comm.allgather("packages" not in facts["errors"])):
        from scripts.checkup.together import measure

        limit.stage = "measuring what the ranks do together: a network that is there may be very slow"
        facts.update(measure(world, fact(facts, "run folder/place")))
    everyone = comm.gather(facts)
    return comm.bcast(report(everyone, settings) if world.rank == 0 else None)


def report(ranks: list[dict], settings, brief: bool = False) -> int:
    """Print and write the findings, in one line if `brief`. Return the exit code."""
    problems = find_problems(CHECKS, ranks, settings.model)
    found = {"verdict": verdict(problems, ranks[0]["place"]), "findings": list(map(asdict, problems)), "ranks": ranks}
    if settings.json == "-":
        say(as_json(found, indent=1))
    elif brief:
        say(f"doctor: {problems[0].severity}: {problems[0].text}; {problems[0].fix}")
    else:
        say(as_text(ranks, problems))
    if settings.json not in (None, "-"):
        try:
            write_json(Path(settings.json), found)
        except UserError as error:
            say(f"doctor.py: error: {error}", on_stderr=True)
            return USER_MISTAKE
    return 1 if any(problem.severity == FAIL for problem in problems) else 0


if __name__ == "__main__":
    open_console()
    main()
