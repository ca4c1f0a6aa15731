"""Run what README.md and docs/benchmarks.md show, and write their figures, tables and numbers from the runs.

    python scripts/makers/make_docs.py PART...
    python scripts/makers/make_docs.py learning --text tinyshakespeare.txt

Each part replaces the text between its own marks, and its figures in docs/figures. A part is a function of its name
in the file that PARTS gives, of a temporary folder and of the path in --text.
"""

import argparse
import tempfile
from importlib import import_module
from pathlib import Path

from scripts.makers.pages.page import FIGURES

PARTS = {
    "comparison": ("pages.training", "a minute: every strategy on 4 ranks"),
    "learning": (
        "scripts.makers.pages.training",
        "three minutes: the preset nanogpt-shakespeare on 2 ranks; needs --text",
    ),
    "first_run": ("pages.first_run", "two minutes: what docs/first-run.md shows, on 2 ranks"),
    "ranks": ("pages.training", "two minutes: GPT-2 124M on 1, 2 and 4 ranks"),
    "memory": ("pages.memory", "some minutes: GPT-2 124M with every strategy on 2 ranks"),
    "sharding": ("pages.memory", "ten minutes, 20 GB: what a rank holds, GPT-2 124M and 350M"),
    "checkpoint": (
        "scripts.makers.pages.checkpoint",
        "five minutes: what a checkpoint of GPT-2 124M costs, on 1 and 2 ranks",
    ),
    "prepare": (
        "scripts.makers.pages.prepare",
        "a minute: prepare.py beside a plain loop over tiktoken; needs GPT-2's vocabulary",
    ),
    "cluster": ("pages.cluster", "a minute, as root: 9 ranks on 5 virtual hosts"),
    "overlap": ("pages.cluster", "a minute, as root: an exchange during backward, on 2 hosts"),
    "exchange": (
        "scripts.makers.pages.exchange",
        "three minutes, as root: one exchange of 8 MB on 5 hosts, PyTorch's too (needed)",
    ),
    "exchange_64MB": ("pages.exchange", "three minutes, as root: the same of 64 MB"),
    "exchange_even": ("pages.exchange", "three minutes, as root: both sizes on 4 hosts of 2 ranks"),
    "exchange_openmpi": (
        "scripts.makers.pages.exchange",
        "two minutes, as root, with Open MPI's Python: both sizes on 5 hosts",
    ),
    "choice": ("pages.choice", "seconds: of docs/benchmarks.md what docs/choosing-a-strategy.md shows"),
    "wire": ("pages.wire", "two minutes: what bfloat16 on the wire does to the loss"),
    "model": ("docs_model", "twenty minutes, as root: the cost model beside measured exchanges"),
    "faults": (
        "scripts.makers.pages.diagnosis",
        "fifteen minutes, as root: what the verdict says of runs with known faults",
    ),
    "pictures": (
        "scripts.makers.pages.pictures",
        "three minutes, as root: every picture of a healthy and of a sick run",
    ),
    "report": (
        "scripts.makers.pages.diagnosis",
        "a minute, as root: the report of 9 ranks on 5 virtual hosts, in chromium (needed)",
    ),
    "failures": (
        "scripts.makers.pages.failures",
        "ten minutes, as root: what fails, under this Python's mpirun and under srun",
    ),
    "random_kills": ("pages.failures", "35 minutes: a run under random kills beside an undisturbed one"),
    "start": ("pages.step", "seconds: what compiled loops cost a process at its start"),
    "step": ("pages.step", "ten minutes: one step, its floor, PyTorch (which it needs)"),
}


def main():
    listed = "\n".join(f"    {name:<18} {what}" for name, (_, what) in PARTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--text", type=Path, help="learning: tinyshakespeare.txt (1,115,394 bytes)")
    arguments = parser.parse_args()
    if "learning" in arguments.parts and not arguments.text:
        parser.error("learning needs --text, the path of tinyshakespeare.txt")
    FIGURES.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            getattr(import_module(f"scripts.makers.{PARTS[part][0]}"), part)(Path(folder), arguments.text)


if __name__ == "__main__":
    main()
