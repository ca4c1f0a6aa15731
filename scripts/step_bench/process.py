"""Contenders of bench_step.py on CPUs and on a GPU: their processes, the statistics of their turns, the file of both.

A contender is a process of its own, which measures when it is asked and is idle otherwise. Requests and answers are a
line of JSON each. {"do": "step", ...} names a function of the contender, the rest are its arguments. The answer is what
the function returns, or {"error": text}; a process that cannot even start gives one error and ends.
"""

import json
import os
import select
import statistics
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

from gpt2.errors import UserError
from gpt2.files import write_json

BENCH_STEP = Path(__file__).parent.parent / "bench_step.py"
TORCH_CONTENDERS = {"torch": "PyTorch, eager", "torch-compiled": "PyTorch, torch.compile"}


class ContenderError(Exception):
    """A contender could not start, ended early or took too long; the text is one line."""


class Contender:
    """A contender's process, seen from bench_step.py. command: what starts it, without its name and shape."""

    def __init__(self, command: list[str], name: str, shape: dict):
        self.name = name
        command = [*command, name, json.dumps(shape)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, limit_s: float | None = None, **arguments) -> dict:
        """The answer to one request. ContenderError: none within limit_s, or an error."""
        with suppress(BrokenPipeError):  # it ended; what it said is read below
            self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], limit_s)[0]:
            raise ContenderError(f"{self.name}: no answer to {do!r} within {limit_s:.0f} s")
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"{self.name} ended with code {self.process.wait()}"}
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process, whose own helpers (a compiler's) may still hold its output open."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


def serve(makers: dict, name: str, shape: str) -> None:
    """The main() of a contender's process: answer requests until there are no more.

    makers[name](shape) returns the contender's functions by name; `shape` comes as JSON. One that fails costs its own
    answer alone.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not come between the answers
    functions = {}
    error = _answer(lambda: functions.update(makers[name](json.loads(shape))))
    if error is not None:
        print(json.dumps(error), file=answers, flush=True)
        return
    for line in sys.stdin:
        request = json.loads(line)
        function = functions[request.pop("do")]
        print(json.dumps(_answer(partial(function, **request))), file=answers, flush=True)


def _answer(function) -> dict | None:
    """What the function returns, or its error."""
    try:
        return function()
    except (ContenderError, UserError) as error:
        return {"error": str(error)}
    except Exception as error:  # of any library: the rest is measured all the same
        traceback.print_exc()
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        return {"error": f"{type(error).__name__}: {first_line}"}


def contender_command(*flags: str) -> list[str]:
    """What starts a contender's process, without its name and shape."""
    return [sys.executable, str(BENCH_STEP), *flags, "--contender"]


def chosen(settings, *names: str) -> dict:
    """The settings of these names."""
    return {name: getattr(settings, name) for name in names}


def statistics_of(seconds: list[float], ours: list[float], tokens: int) -> dict:
    """Median and spread of a contender's steps of so many tokens, beside ours of the same turns.

    The ratio is the median of the ratios turn by turn: what slows the machine down slows both sides of a turn.
    """
    return {
        "step_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "tokens_per_s": tokens / statistics.median(seconds),
        "ours_over_this": statistics.median(a / b for a, b in zip(ours, seconds, strict=True)),
    }


def write_report(settings, report: dict) -> None:
    """--json, if it was given. UserError."""
    if settings.json:
        write_json(settings.json, report)


def import_torch():
    """PyTorch and torch_gpt2.py. ContenderError where it is not installed."""
    try:
        import torch

        from scripts.step_bench import torch_gpt2
    except ImportError:
        raise ContenderError("--vs torch needs PyTorch: pip install torch (the project itself does not)") from None
    return torch, torch_gpt2
