"""Parts of make_docs.py: one step on one rank, and what a process pays at its start."""

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.machine.host import machine, versions
from scripts.makers.pages.page import SCRIPTS, replace_block


def step(folder: Path, _) -> None:
    tables = []
    for length in (256, 64):
        file = folder / f"{length}.json"
        command = [sys.executable, str(SCRIPTS / "bench_step.py"), "--seq-len", str(length), "--vs", "torch"]
        output = subprocess.run([*command, "--json", file], stdout=subprocess.PIPE, text=True, check=True).stdout
        print(output)
        tables.append(f"```\n{output.rstrip()}\n```")
    report = json.loads(file.read_text())
    where, torch = report["machine"], report["contenders"]["torch"]["versions"]["torch"]
    tables.append(
        f"Measured on {where['processor']}, {where['cores']} cores, with python {where['python']}, "
        f"numpy {where['numpy']}, numba {where['numba']}, torch {torch}."
    )
    replace_block("docs/benchmarks.md", "step", "\n\n".join(tables))


def start(folder: Path, _) -> None:
    """A process's first step with an empty cache of compiled loops, and with what that left."""
    rows = ["| cache of compiled loops | import of the kernels, s | first step, s |", "|---|---|---|"]
    for cache in ("empty", "filled"):
        command = [sys.executable, str(SCRIPTS / "makers" / "first_step.py")]
        environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        seconds = json.loads(output)
        rows.append(f"| {cache} | {seconds['import_s']:.2f} | {seconds['first_step_s']:.2f} |")
    where, packages = machine(), versions("numpy", "numba")
    named = ", ".join(f"{name} {version}" for name, version in packages.items())
    rows += ["", f"Measured on {where['processor']}, {where['cores']} cores, with {named}."]
    replace_block("docs/benchmarks.md", "start", "\n".join(rows))
