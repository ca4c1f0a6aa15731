"""Helpers for the parts of make_docs.py: run commands, read runs, describe the machine, replace blocks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from dist.probe.programs import mpirun_environment
from scripts.machine.blas import blas_text

SCRIPTS = Path(__file__).parents[2]
ROOT = SCRIPTS.parent
FIGURES = ROOT / "docs" / "figures"


class Part(SimpleNamespace):
    """A part's entry in parts.toml, its `name` and the options of the command line, as attributes."""

    def filled(self, rows: Iterable[dict] = (), **found) -> str:
        """Fill in the part's text: {rows} with `row` for each of `rows`, other fields by name."""
        lines = "\n".join(self.row.format(**row) for row in rows)
        return self.text.strip().format(**vars(self) | found, rows=lines)


def output_of(*command: object, python: str = sys.executable, **options) -> str:
    """Run a command; print and return its output. Raise CalledProcessError if it fails.

    A word like "train.py" is replaced by `python` and the program's path in scripts/ or tests/suites/.
    """
    words = []
    for word in map(str, command):
        words += [python, str(program(word))] if word.endswith(".py") else [word]
    lines = []
    with subprocess.Popen(words, **{"cwd": ROOT} | options, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:  # at once: a suite takes half an hour
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return "".join(lines)


def program(name: str) -> Path:
    folders = (SCRIPTS, ROOT / "tests" / "suites")
    return next(folder / name for folder in folders if (folder / name).exists())


def compare(folder: Path, ranks: int, strategies: str, training: str = "") -> dict[str, Path]:
    """Run scripts/compare.py into `folder`; return the run folders by strategy."""
    flags = ("--ranks", ranks, "--strategies", strategies, "--out", folder)
    output_of("compare.py", *flags, *(["--", *training.split()] if training else []))
    return {name: folder / name.replace("/", "-") for name in strategies.split(",")}


def on_hosts(hosts: str, *command: object, **options) -> str:
    """Run a command on virtual hosts; return its output without the table of hosts."""
    return (
        output_of("virtual_cluster.py", "run", *hosts.split(), "--", *command, **options).partition("\n\n")[2].strip()
    )


def shown(command: str, folder: Path = ROOT) -> str:
    """Run a shell command in `folder`; return "$ command" and its output. `python` and `mpirun` are this Python's."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    output = output_of("sh", "-c", command, cwd=folder, env=mpirun_environment(2) | {"PATH": path})
    return f"$ {command}\n{output.rstrip()}"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def log_of(run: Path) -> list[dict]:
    """Return the lines of the run's log."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def fenced(text: str) -> str:
    return f"```\n{text.strip()}\n```"


def measured_on(source: Path) -> str:
    """Describe machine and versions of a run folder or of a benchmark's JSON file."""
    found = read(source / "config.json" if source.is_dir() else source)
    libraries = [found["mpi_library"]] if "mpi_library" in found else []
    if source.is_dir():
        libraries += [blas_text(kind) for kind in found.get("blas", ())]
    return measured_with(found["machine"], *libraries, **found["versions"])


def measured_with(machine: dict, *libraries: str, **versions: str) -> str:
    """Return a text like "Measured on AMD EPYC, 2 cores, with MPICH 5.0.2, numpy 2.4.6."."""
    named = [f"{name} {version}" for name, version in versions.items() if name != "gpt2-mpi"]
    return f"Measured on {machine['processor']}, {machine['cores']} cores, with {', '.join([*libraries, *named])}."


def library_name(text: str) -> str:
    """Return "MPICH" or "Open MPI" from the library's own description."""
    return text.split()[0].replace("Open", "Open MPI")


def replace_block(page: str, name: str, text: str) -> None:
    """Replace the text between the page's two marks of this name."""
    path = ROOT / page
    begin = f"<!-- begin generated: {name} -->"
    end = f"<!-- end generated: {name} -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
