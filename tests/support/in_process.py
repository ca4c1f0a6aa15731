"""Programs in a test's own process, which has imported them already: scripts/train.py on the ranks of a test marked
`ranks`, and those that need no ranks."""

import json
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from scripts.machine.checkout import Checkout

ROOT = Path(__file__).parents[2]
PEAK_GIVEN = ("--peak-tflops", "0.1")


def train(world, out, *flags, peak=PEAK_GIVEN, code=None) -> None:
    """One run on all ranks of `world`, as scripts/train.py with these flags; its folder is whole on return.

    peak: flags as well. Without, it is measured, which takes longer than a few small steps do. code: the exit code that
    it must have, None for any.
    """
    from scripts import train
    from scripts.training import assemble

    settings = train.parse_settings("", [*peak, *map(str, flags), "--out", str(out)])
    with mock.patch.object(assemble, "Checkout", checkout):
        found = train.train(settings, world)
    assert code in (None, found)
    world.comm.Barrier()


@cache
def checkout():
    """What git says of the code, asked once."""
    return SimpleNamespace(facts=cache(Checkout().facts))


def log(run: Path) -> list[dict]:
    """The steps of a run."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def alone():
    """The world of this rank and no other."""
    from mpi4py import MPI

    from dist.world import world_of

    return world_of(MPI.COMM_SELF, MPI.COMM_SELF)


def answer(program, *arguments) -> str:
    """What a program of scripts/ prints that needs no ranks. program: its module."""
    words = [f"{program.__name__}.py", *map(str, arguments)]
    with mock.patch.object(sys, "argv", words), redirect_stdout(StringIO()) as printed:
        assert program.main() in (None, 0)
    return printed.getvalue()
