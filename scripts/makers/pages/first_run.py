"""Part of make_docs.py: docs/first-run.md's commands, run as they stand there, and what they print."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from dist.probe.programs import mpirun_command, mpirun_environment
from scripts.makers.pages.page import FIGURES, SCRIPTS, machine, replace_block

PAGE = "docs/first-run.md"
TRAIN = "mpirun -n 2 python scripts/train.py --out runs/first"
DIAGNOSE = "python scripts/diagnose.py runs/first"
PLOT = "python scripts/plot.py runs/first"
SAMPLE = 'python scripts/sample.py runs/first --prompt "def " --tokens 120 --seed 7'
OTHER = "mpirun -n 2 python scripts/train.py --strategy reduce-bcast --out runs/server"
COMPARE = "python scripts/plot.py runs/first runs/server --out runs/compared"
FILES = "ls runs/first runs/first/traces runs/first/checkpoints/*"


def first_run(folder: Path, _) -> None:
    (folder / "scripts").symlink_to(SCRIPTS)
    for name, commands in {
        "train": [TRAIN], "files": [FILES], "diagnose": [DIAGNOSE], "plot": [PLOT], "sample": [SAMPLE],
        "compare": [OTHER, COMPARE],
    }.items():  # fmt: skip
        printed = [f"$ {command}\n{output_of(command, folder)}" for command in commands]
        where = f"\n\n{machine(folder / 'runs' / 'first')}" if name in ("train", "compare") else ""
        replace_block(PAGE, f"first_run_{name}", "```\n{}\n```{}".format("\n\n".join(printed), where))
    shutil.copy(folder / "runs/first/plots/timeline.png", FIGURES / "first-run.png")


def output_of(command: str, folder: Path) -> str:
    """What it prints; of the second training, whose settings are alike, the last lines."""
    words, environment = shlex.split(command), None
    if words[0] == "mpirun":
        environment, words = mpirun_environment(int(words[2])), [*mpirun_command(int(words[2])), *words[3:]]
    if words[0] == "ls":
        words = ["sh", "-c", command]
    words = [sys.executable if word == "python" else word for word in words]
    output = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(output)
    lines = output.rstrip().splitlines()
    return "\n".join(["...", *lines[-4:]] if command == OTHER else lines)
