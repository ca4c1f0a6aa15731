"""Run the project's programs by name, where the project is installed.

    gpt2-mpi COMMAND [FLAGS...]
    mpirun -n 4 gpt2-mpi train --strategy sliced
    mpirun -n 4 python -m scripts train --strategy sliced         the same in a checkout: scripts/__main__.py

A command is a file of this folder: `train` is train.py, `bench-step` is bench_step.py. --help lists the first line of
each file; gpt2-mpi COMMAND --help lists its flags.
"""

import ast
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

from dist.console import open_console
from dist.probe.programs import RANKS, is_first
from scripts.machine.host import version_of
from scripts.settings.command_line import Parser

NAME = "gpt2-mpi"
FOLDER = Path(__file__).parent


def commands() -> dict[str, Path]:
    """Return the programs by the names of their commands."""
    programs = [path for path in FOLDER.glob("*.py") if not path.name.startswith("__")]
    return {path.stem.replace("_", "-"): path for path in sorted(programs)}


def overview() -> str:
    """Return the text that --help prints."""
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:<{width}}  {first_line(path)}" for name, path in known.items()]
    return "\n".join([f"usage: {NAME} COMMAND [FLAGS...]", "", *lines, "", f"{NAME} COMMAND --help says its flags."])


def first_line(path: Path) -> str:
    """Return the first line of a program's docstring."""
    return ast.get_docstring(ast.parse(path.read_text())).partition("\n")[0]


def main() -> None:
    """Run the program that the command line names, as if it had been called directly."""
    words = sys.argv[1:]
    parser = Parser(prog=NAME)
    if not words:
        parser.error("a command is missing")
    name = words[0].removesuffix(".py").replace("_", "-")
    if words[0] in ("-h", "--help", "--version"):
        open_console()
        if is_first(RANKS):
            print((version_of(NAME) or "not installed") if words[0] == "--version" else overview())
        raise SystemExit(0)
    if name not in commands():
        close = get_close_matches(name, commands(), 1)
        parser.error(f"{words[0]!r} is not a command" + (f": did you mean {close[0]}?" if close else ""))
    sys.argv = [f"{NAME} {name}", *words[1:]]
    runpy.run_module(f"{__package__}.{name.replace('-', '_')}", run_name="__main__")


if __name__ == "__main__":
    main()
