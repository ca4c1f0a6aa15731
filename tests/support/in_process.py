"""scripts/train.py in the processes of a test marked `ranks`: starting ranks takes longer than a short run."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEAK_GIVEN = ("--peak-tflops", "0.1")


def train(world, out, *flags, peak=PEAK_GIVEN, code=None) -> None:
    """One run on all ranks of `world`, as scripts/train.py with these flags; its folder is whole on return.

    peak: flags as well. Without, it is measured, which takes longer than a few small steps do. code: the exit code that
    it must have, None for any.
    """
    from scripts import train

    settings = train.parse_settings("", [*peak, *map(str, flags), "--out", str(out)])
    found = train.train(settings, world)
    assert code in (None, found)
    world.comm.Barrier()


def log(run: Path) -> list[dict]:
    """The steps of a run."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def alone():
    """The world of this rank and no other."""
    from mpi4py import MPI

    from dist.world import world_of

    return world_of(MPI.COMM_SELF, MPI.COMM_SELF)
