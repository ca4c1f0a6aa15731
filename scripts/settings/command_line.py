"""The parser of command lines. It reports a mistake in one line, with a suggestion.

argparse prints the usage first, which takes pages for train.py, and suggests nothing for unknown flags (in Python 3.14
suggest_on_error covers only the values of flags).
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from dist.console import USER_MISTAKE
from dist.probe.programs import RANKS, is_first

DASHES = "-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"  # text processors replace "--" with these
SPEAKING_S = 0.6  # other processes wait this long for the process that prints
SHOWN = 60  # characters of a user's word in a message
# Flags of nanoGPT, llm.c, Megatron-LM and Hugging Face's trainer, and our names for them. Similar names, such as
# micro-batch-size, are found without an entry.
ELSEWHERE = {
    "learning-rate": "lr",
    "max-steps": "steps",
    "max-iters": "steps",
    "num-iterations": "steps",
    "train-iters": "steps",
    "gradient-accumulation-steps": "grad-accum",
    "block-size": "seq-len",
    "max-grad-norm": "grad-clip",
    "clip-grad": "grad-clip",
    "adam-eps": "eps",
    "save-interval": "checkpoint-every",
    "save-steps": "checkpoint-every",
    "output-dir": "out",
    "logging-steps": "log-every",
    "device": "backend",
    "precision": "dtype",
}


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line on stderr, with exit code 2. Flags cannot be abbreviated.

    description: printed unchanged by --help.
    """

    def __init__(self, description: str | None = None, **options):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=raw, allow_abbrev=False, **options)

    def parse_known_args(self, arguments=None, namespace=None):
        """Report unknown flags here, because the outer parser does not know the flags of a subcommand."""
        self._words = sys.argv[1:] if arguments is None else list(arguments)
        given, unknown = super().parse_known_args(self._words, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return given, unknown

    def error(self, message: str):
        if "arguments are required: " in message:
            message = self._missing(message.rpartition(": ")[2])
        self.end(f"{message} (see {self.prog} --help)")

    def print_help(self, file=None):
        """Print the help once for all processes of a job."""
        if is_first(RANKS):
            super().print_help(file)

    def end(self, text: str):
        """Print the text on the first process. Others wait: a launcher ends the job when one process ends."""
        if not is_first(RANKS):
            time.sleep(SPEAKING_S)
            self.exit(USER_MISTAKE)
        self.exit(USER_MISTAKE, f"{self.prog}: error: {text}\n")

    def _missing(self, names: str) -> str:
        """Return the message for missing arguments, such as "RUN, --out". One of them may be misspelt."""
        known = {*self._option_string_actions, "--"}
        for word in self._words:
            if word.startswith("--") and word.partition("=")[0] not in known:
                return self._unknown(word)
        folder = f", expected a run folder{newest_run()}" if names.startswith("RUN") else ""
        return f"{names} {'are' if ', ' in names else 'is'} missing{folder}"

    def _unknown(self, word: str) -> str:
        """Return the message for an unknown word where a flag is expected."""
        shown = word if len(word) <= SHOWN else f"{word[:SHOWN]}..."
        if not word.startswith(tuple(DASHES)):
            hint = "a command comes after --" if "-- COMMAND" in (self.usage or "") else "a glob needs quotes"
            return f"{shown!r} was given where a flag is expected; {hint}"
        name = word.partition("=")[0].strip(DASHES).replace("_", "-").lower()
        known = [flag.removeprefix("--") for flag in self._option_string_actions]
        close = get_close_matches(name, known, 1) if len(name) > 2 else []
        meant = [ELSEWHERE[name]] if ELSEWHERE.get(name) in known else close
        return f"{shown} is not a flag" + (f": did you mean --{meant[0]}?" if meant else "")


def newest_run() -> str:
    """Return ", such as runs/a, the newest here", as a suggestion; "" if there is no run."""
    with suppress(OSError):
        found = [path.parent for path in Path("runs").glob("*/config.json")]
        return f", such as {max(found, key=os.path.getmtime)}, the newest here" if found else ""
    return ""
