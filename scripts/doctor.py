"""What this machine or allocation is, and what will go wrong when a training is started on it, each with its fix.

    python scripts/doctor.py                            this host alone
    mpirun -n 4 python scripts/doctor.py                the ranks, as a training would get them
    srun --mpi=pmix -n 16 python scripts/doctor.py --expect-ranks 16 --model gpt2-124M --out $SCRATCH/runs

Start it as the training will be started. It prints facts, findings ("will fail", "will be slow", "note") and a verdict.
Exit code: 1 if something will fail, else 0. It takes some seconds, and ends after --limit seconds whatever hangs.
If MPICH itself ends it under srun --mpi=pmi2 ("invalid client request"), export MPIR_CVAR_CH4_NETMOD=ofi.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpt2.config import PRESETS
from scripts.checkup import gpu, machine, software
from scripts.checkup.check_software import foreign_launcher
from scripts.checkup.checks import find
from scripts.checkup.facts import gather, new_facts
from scripts.checkup.findings import FAIL
from scripts.checkup.limit import TimeLimit
from scripts.checkup.report import as_dict, as_text, one_line

USER_MISTAKE = 2  # exit code, as argparse's
PRINTING_S = 0.3  # a launcher may drop what it has not passed on when a job ends
RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def main():
    settings = parse()
    limit, facts = TimeLimit(settings.limit), new_facts()
    limit.stage = "looking at its own machine"
    # Before MPI starts: some of it starts processes, and nothing here may hold up a rank that others wait for.
    gather(facts, software.sections() | machine.sections(settings.out) | gpu.sections())
    if "MPI" in facts["errors"]:
        raise SystemExit(report([facts], settings, brief=not is_first()))
    warn(facts)
    raise SystemExit(examine_together(facts, settings, limit))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help="where run folders will be made (runs)")
    add("--model", choices=PRESETS, help="say whether it fits: memory, shared memory, checkpoints")
    add("--expect-ranks", type=int, metavar="N", help="it will fail if there are more or fewer")
    add("--limit", type=float, default=180.0, metavar="SECONDS", help="end then, whatever hangs (180)")
    add("--json", nargs="?", const="-", metavar="FILE", help="facts and findings as one object: to FILE, or as output")
    return parser.parse_args()


def is_first() -> bool:
    """Whether this process is rank 0, or none of several, as far as its launcher says."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


def warn(facts: dict) -> None:
    """Before MPI starts: it may end this process, with an error of its own that names no fix; the first ends all."""
    launcher = facts.get("launcher", {"kind": "", "variables": {}})
    if warning := foreign_launcher(launcher["kind"], facts["MPI"]["family"], launcher["variables"]):
        print(f"doctor: if MPI ends here: {warning}", file=sys.stderr, flush=True)
        time.sleep(PRINTING_S)


def examine_together(facts: dict, settings, limit: TimeLimit) -> int:
    """The exit code, on all ranks. What a rank meets on its own has become facts: all make the same calls."""
    from mpi4py import MPI

    from dist.world import install_abort_hook, lost_ranks, start_mpi, world_of

    limit.stage = "starting MPI: does the launcher fit the library (srun --mpi=list), do the nodes reach each other?"
    comm = start_mpi()
    install_abort_hook(comm)
    facts["MPI"]["thread_level"] = thread_level(MPI)
    if problem := lost_ranks(comm.size, settings.expect_ranks, os.environ):
        facts["lost"] = problem
        if comm.size == 1:  # one of many copies that all say so
            return report([facts], settings, brief=True)
    limit.stage = "meeting the other ranks: one of them may have ended, or not be reachable"
    world = world_of(comm, comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
    facts["place"] = world.places[world.rank] | {
        "size": world.size, "nodes": world.node_count, "local_size": world.local_size,
    }  # fmt: skip
    gather(facts, gpu.rank_sections(world.local_rank))
    measure(facts, world, limit)
    everyone = comm.gather(facts)
    return comm.bcast(report(everyone, settings) if world.rank == 0 else None)


def measure(facts: dict, world, limit: TimeLimit) -> None:
    """What takes all ranks; if one lacks a package for it, its facts say so, and nobody measures."""

    def find_tools():
        pass

    gather(facts, {"measuring": find_tools})
    if all(world.comm.allgather("measuring" not in facts["errors"])):
        from scripts.checkup.network import measure

        limit.stage = "measuring what the ranks do together: a network that is there may be very slow"
        facts.update(measure(world, facts.get("run folder", {}).get("place")))


def thread_level(MPI) -> str:
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return {getattr(MPI, f"THREAD_{name}"): name for name in names}[MPI.Query_thread()]


def report(ranks: list[dict], settings, brief: bool = False) -> int:
    """Print and write what was found; the exit code."""
    findings = find(ranks, settings.model)
    whole = json.dumps(as_dict(ranks, findings), indent=1) if settings.json else ""
    if settings.json == "-":
        print(whole, flush=True)
    else:
        print(one_line(findings) if brief else as_text(ranks, findings), flush=True)
    if settings.json not in (None, "-"):
        try:
            Path(settings.json).write_text(whole + "\n")
        except OSError as error:
            print(f"error: {settings.json} cannot be written: {error.strerror}: choose another", file=sys.stderr)
            return USER_MISTAKE
    return 1 if any(finding.severity == FAIL for finding in findings) else 0


if __name__ == "__main__":
    main()
