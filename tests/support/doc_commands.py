"""The commands in the code blocks of README.md and docs/*.md, one by one, and the flags that their scripts know."""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from scripts.settings.training import Settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("mpirun", "srun", "sbatch", "scancel", "sudo", "env", "python", "make", "pip", "module", "ls", "git", "cd")
SCRIPT = re.compile(r"scripts/(?:slurm/)?\w+\.(?:py|sbatch)")
FENCE, BEGIN, END = re.compile(r" {0,3}```(\w*)"), "<!-- begin generated: ", "<!-- end generated: "
INLINE = re.compile(r"`((?:sudo |mpirun |srun |python |make )[^`]*)`")


@dataclass(frozen=True)
class Command:
    """words: without comment and "..."; block: the part of make_docs.py that wrote it, None of one written by hand."""

    page: str
    line: int
    words: tuple[str, ...]
    block: str | None

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def commands() -> list[Command]:
    return [command for page in PAGES for command in commands_of(page)]


def commands_of(page: Path) -> list[Command]:
    """Of its fenced and indented blocks; a line with && is several."""
    found, begun = [], ""
    for number, line, block in code_lines(page.read_text()):
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        words, begun = words_of(begun), ""
        for part in parts_of(words):
            if Path(part[0]).name in PROGRAMS or part[0].startswith("--"):
                found.append(Command(str(page.relative_to(ROOT)), number, part, block))
    return found


def inline_commands() -> list[Command]:
    """Those in running text, which name flags too."""
    return [
        Command(str(page.relative_to(ROOT)), number, words_of(text), None)
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        for text in INLINE.findall(line)
    ]


def code_lines(text: str):
    """(line number, line, generated block that it is in), of code in no language."""
    fence = block = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(BEGIN):
            block = line.removeprefix(BEGIN).removesuffix(" -->")
        elif line.startswith(END):
            block = None
        elif mark := FENCE.match(line):
            fence = mark[1] if fence is None else None
        elif fence == "" or (fence is None and line.startswith("    ")):
            yield number, line.strip().removeprefix("$ "), block


def words_of(line: str) -> tuple[str, ...]:
    """() of a line that no shell would read: a table, a sentence."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return ()
    return tuple(word.removeprefix(".venv/bin/") for word in words if word != "...")


def parts_of(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    text = "\0".join(words).split("\0&&\0")
    return [tuple(part.split("\0")) for part in text if part]


HANDING_ON = ("scripts/compare.py",), ("scripts/bench_training.py",)  # what stands behind -- to train.py


def unknown_flags(command: Command) -> list[str]:
    """What stands behind a script and is none of its flags; behind `--` another command or another script's flags."""
    unknown, script = [], None
    for word, after in zip(command.words, (*command.words[1:], ""), strict=True):
        if SCRIPT.fullmatch(word):
            script = (word, after) if after == "run" else (word,)
        elif word == "--":
            script = ("scripts/train.py",) if script in HANDING_ON else None
        elif script and word.startswith("--") and word.split("=")[0] not in flags_of(*script):
            unknown.append(f"{' '.join(script)} {word}")
    return unknown


@cache
def flags_of(script: str, *subcommand: str) -> set[str]:
    """A job script hands its flags to train.py."""
    if script == "scripts/train.py" or script.endswith(".sbatch"):
        return training_flags()
    command = [sys.executable, str(ROOT / script), *subcommand, "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return set(re.findall(r"--[a-z][\w-]*", printed.partition("options:")[2]))


def training_flags() -> set[str]:
    names = [item.name.replace("_", "-") for item in fields(Settings)]
    return {f"--{name}" for name in names} | {"--no-shuffle", "--no-overlap", "--help"}
