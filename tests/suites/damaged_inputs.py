"""Thousands of damaged files of every format that is read: none ends in a traceback, none is read wrongly.

    python tests/suites/damaged_inputs.py
    python tests/suites/damaged_inputs.py --inputs 100000 --seed 7 --kinds 'run, trace' manifest.json

Each file is damaged in one to three places, drawn from the seed, and read by what reads it in earnest. It is refused by
one line that names it, or what is read is what a reference reader finds in it (tests/suites/damaged/). A reader may
take 10 s and 1 GiB. The exit code is 1 if any did otherwise: its format, number and first bytes are printed.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.suites.damaged.table import KINDS
from tests.support.mutations import ANOTHER, ORIGINAL, PART, REFUSED, read_mutants

OUTCOMES = (REFUSED, PART, ORIGINAL, ANOTHER)


def main() -> int:
    settings, begun = parse(), time.monotonic()
    kinds = [kind for kind in settings.kinds if not KINDS[kind].missing]
    each, rest = divmod(settings.inputs, len(kinds))
    totals, wrong = dict.fromkeys(("inputs", *OUTCOMES), 0), 0
    print(row("seed " + str(settings.seed), ("inputs", *OUTCOMES), "what may be read that was not written"))
    for number, kind in enumerate(kinds):
        count = each + (number < rest)
        found = examine(kind, count, settings.seed)
        wrong += found is None
        if found is not None:
            numbers = [count, *(found[outcome] for outcome in OUTCOMES)]
            totals = {name: totals[name] + number for name, number in zip(totals, numbers, strict=True)}
            print(row(kind, numbers, KINDS[kind].other if found[ANOTHER] else ""), flush=True)
    print(row("all", totals.values(), f"{time.monotonic() - begun:.0f} s"))
    for kind in settings.kinds:
        if KINDS[kind].missing:
            print(f"left out: {kind}: {KINDS[kind].missing}")
    print(
        f"{wrong} of {len(kinds)} formats crashed or were read wrongly" if wrong else "none crashed, none read wrongly"
    )
    return 1 if wrong else 0


def examine(kind: str, count: int, seed: int):
    """The counts of a format's outcomes; None where a mutant crashed its reader or was read wrongly, which is said."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return read_mutants(KINDS[kind].make(Path(folder)), count, seed)
        except Exception:
            print(f"{kind}: WRONG\n{traceback.format_exc()}", flush=True)
            return None


def row(name: str, numbers, why: str) -> str:
    return f"{name:<26}" + "".join(f"{number:>{max(8, len(outcome) + 2)}}" for number, outcome in
                                   zip(numbers, ("inputs", *OUTCOMES), strict=True)) + f"  {why}"  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="damaged files of all formats together (10000)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20), help="of the damage (another each time)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="formats (all)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
