"""Helpers for the parts of make_docs.py: run commands, describe the machine, replace blocks."""

import json
import os
import subprocess
import sys
from pathlib import Path

from dist.probe.programs import mpirun_environment
from scripts.machine.blas import blas_text

SCRIPTS = Path(__file__).parents[2]
ROOT = SCRIPTS.parent
FIGURES = ROOT / "docs" / "figures"


def output_of(*command: object, **options) -> str:
    """Run a command; print and return its output. Raise CalledProcessError if it fails.

    A word like "train.py" is replaced by this Python and the program's path in scripts/ or tests/suites/.
    """
    words = []
    for word in map(str, command):
        words += [sys.executable, str(program(word))] if word.endswith(".py") else [word]
    lines = []
    with subprocess.Popen(words, **{"cwd": ROOT} | options, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:  # print at once: a suite takes half an hour
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return "".join(lines)


def program(name: str) -> Path:
    folders = (SCRIPTS, ROOT / "tests" / "suites")
    return next(folder / name for folder in folders if (folder / name).exists())


def on_hosts(hosts: str, *command: object) -> str:
    """Run a command on virtual hosts; return its output without the table of hosts."""
    return output_of("virtual_cluster.py", "run", *hosts.split(), "--", *command).partition("\n\n")[2].strip()


def shown(command: str, folder: Path = ROOT) -> str:
    """Run a shell command in `folder`; return "$ command" and its output. `python` is this Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    output = output_of("sh", "-c", command, cwd=folder, env=mpirun_environment(2) | {"PATH": path})
    return f"$ {command}\n{output.rstrip()}"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def fenced(text: str) -> str:
    return f"```\n{text.strip()}\n```"


def measured_on(facts: dict, **versions: str) -> str:
    """Return a text like "Measured on AMD EPYC, 2 cores, with MPICH 5.0.2, numpy 2.4.6.".

    facts: a run's config.json, or a benchmark's report. versions: further names and versions.
    """
    named = facts.get("versions", {}) | versions
    libraries = [facts["mpi_library"]] if "mpi_library" in facts else []
    libraries += [
        *map(blas_text, facts.get("blas", ())),
        *(f"{key} {named[key]}" for key in named if key != "gpt2-mpi"),
    ]
    machine = facts["machine"]
    return f"Measured on {machine['processor']}, {machine['cores']} cores, with {', '.join(libraries)}."


def replace_block(page: str, name: str, text: str) -> None:
    """Replace the text between the page's begin and end marks of this name."""
    path = ROOT / page
    begin = f"<!-- begin generated: {name} -->"
    end = f"<!-- end generated: {name} -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
