"""How programs read their command lines: a mistake is one line, which names what may have been meant.

argparse prints its usage first, pages of it for train.py, and suggests nothing for a flag that it does not know; what
Python 3.14 calls suggest_on_error is for the values of flags alone.
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

DASHES = "-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"  # what text processors make of "--"
SPEAKING_S = 0.6  # what others leave to the process that speaks
SHOWN = 60  # characters of a user's word
# What nanoGPT, llm.c, Megatron-LM and Hugging Face's trainer call flags of ours that are not spelt alike.
ELSEWHERE = {
    "learning-rate": "lr",
    "max-steps": "steps",
    "max-iters": "steps",
    "num-iterations": "steps",
    "train-iters": "steps",
    "micro-batch-size": "batch-size",
    "total-batch-size": "global-batch-size",
    "gradient-accumulation-steps": "grad-accum",
    "block-size": "seq-len",
    "sequence-length": "seq-len",
    "max-grad-norm": "grad-clip",
    "clip-grad": "grad-clip",
    "adam-eps": "eps",
    "save-interval": "checkpoint-every",
    "save-steps": "checkpoint-every",
    "output-dir": "out",
    "logging-steps": "log-every",
    "device": "backend",
    "precision": "dtype",
    "init-from": "init",
    "tensor-model-parallel-size": "tensor-parallel",
    "pipeline-model-parallel-size": "pipeline-parallel",
}


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line on stderr, and exit code 2. A flag has to be written out.

    description: printed by --help as it is.
    """

    def __init__(self, description: str | None = None, **options):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=raw, allow_abbrev=False, **options)

    def parse_known_args(self, arguments=None, namespace=None):
        """What is not known is a mistake here already: a subcommand's parser knows its flags, the one around it not."""
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
        """Once for all processes of a job."""
        if is_first(RANKS):
            super().print_help(file)

    def end(self, text: str):
        """Of a job without MPI yet, the first process speaks; a launcher ends it as soon as another one has ended."""
        if not is_first(RANKS):
            time.sleep(SPEAKING_S)
            self.exit(USER_MISTAKE)
        self.exit(USER_MISTAKE, f"{self.prog}: error: {text}\n")

    def _missing(self, names: str) -> str:
        """What is said where arguments are missing, such as "RUN, --out": one of them may be there, but misspelt."""
        known = {*self._option_string_actions, "--"}
        for word in self._words:
            if word.startswith("--") and word.partition("=")[0] not in known:
                return self._unknown(word)
        folder = f", expected a run folder{newest_run()}" if names.startswith("RUN") else ""
        return f"{names} {'are' if ', ' in names else 'is'} missing{folder}"

    def _unknown(self, word: str) -> str:
        """What is said of a word that stands where a flag does."""
        shown = word if len(word) <= SHOWN else f"{word[:SHOWN]}..."
        if not word.startswith(tuple(DASHES)):
            hint = "a command comes after --" if "-- COMMAND" in (self.usage or "") else "a glob needs quotes"
            return f"{shown!r} stands where a flag is expected; {hint}"
        asked = word.partition("=")[0].strip(DASHES).replace("_", "-").lower()
        known = [flag.removeprefix("--") for flag in self._option_string_actions]
        close = get_close_matches(asked, known, 1) if len(asked) > 2 else []
        meant = [ELSEWHERE[asked]] if ELSEWHERE.get(asked) in known else close
        return f"{shown} is no flag" + (f": did you mean --{meant[0]}?" if meant else "")


def newest_run(runs: Path = Path("runs")) -> str:
    """ ", such as runs/a, the newest here": what a user may have meant; "" where there is none."""
    with suppress(OSError):
        found = [path.parent for path in runs.glob("*/config.json")]
        return f", such as {max(found, key=os.path.getmtime)}, the newest here" if found else ""
    return ""
