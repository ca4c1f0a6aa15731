"""Parts of make_docs.py that show the output of programs on this machine."""

import shutil
from pathlib import Path

from scripts.makers.pages.page import FIGURES, SCRIPTS, Part, fenced, measured_on, measured_with, output_of, read, shown


def first_run(part: Part, folder: Path) -> dict[str, str]:
    """Run the commands of docs/first-run.md in order; show only the end of the second training."""
    (folder / "scripts").symlink_to(SCRIPTS)
    blocks = {}
    for name, commands in part.commands.items():
        texts = [shown(command, folder) for command in commands]
        if name == "compare":
            command, *lines = texts[0].splitlines()
            texts[0] = "\n".join([command, "...", *lines[-4:]])
        where = f"\n\n{measured_on(folder / 'runs' / 'first')}" if name in ("train", "compare") else ""
        blocks[f"first_run_{name}"] = fenced("\n\n".join(texts)) + where
    output_of("plot.py", folder / "runs/first")
    shutil.copy(folder / "runs/first/plots/timeline.png", FIGURES / "first-run.png")
    return blocks


def step(part: Part, folder: Path) -> str:
    """Return the table of one step on one rank, compared with PyTorch."""
    file = folder / "step.json"
    flags = "--seq-len", part.length, "--dtype", part.dtype, "--vs", "torch", "--json", file
    table = fenced(output_of("bench_step.py", *flags).partition("\n\nthis project, where")[0])
    machine = read(file)["machine"]
    versions = {name: machine[name] for name in ("python", "numpy", "numba")}
    versions |= read(file)["contenders"]["torch"]["versions"]
    return f"{table}\n\n{measured_with(machine, **versions)}"


def choice(part: Part, folder: Path) -> dict[str, str]:
    """Show the advice for a cluster, and for a model that ranks share."""
    return {"choice_advice": fenced(shown(part.advise)), "choice_cut": fenced(shown(part.cut))}
