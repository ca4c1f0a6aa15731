"""Run the contenders of bench_step.py as processes: requests, answers, statistics of their turns.

Each contender has its own process, which measures on request and is idle otherwise. A request is a line of JSON: "do"
names a function of the contender, the other keys are its arguments. The answer is a line with the function's result, or
{"error": text}. A process that cannot start sends one error and ends.
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
from scripts.bench.turns import step_times

BENCH_STEP = Path(__file__).parent.parent / "bench_step.py"
TORCH_CONTENDERS = {"torch": "PyTorch, eager", "torch-compiled": "PyTorch, torch.compile"}


class ContenderError(Exception):
    """A contender could not start, ended early or took too long. The message is one line."""


class ContenderProcess:
    """bench_step.py's handle of a contender's process. command: the command line, without name and shape."""

    def __init__(self, command: list[str], name: str, shape: dict):
        self.name = name
        command = [*command, name, json.dumps(shape)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, limit_s: float | None = None, **arguments) -> dict:
        """Return the answer to a request. Raise ContenderError for an error, or if none comes within limit_s."""
        with suppress(BrokenPipeError):  # the process has ended; the code below reads its last answer
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
        """End the process. Its child processes (of a compiler) may still hold its output open."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


def serve(makers: dict, name: str, shape: str) -> None:
    """Run a contender's process: answer requests until there are no more.

    makers[name](shape) returns the contender's functions by name; `shape` is parsed from JSON. If a function fails,
    only its own answer is lost.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries must not print between the answers
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
    """Call the requested function. Return its result or its error."""
    try:
        return function()
    except (ContenderError, UserError) as error:
        return {"error": str(error)}
    except Exception as error:  # any library may raise; the other contenders are still measured
        traceback.print_exc()
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        return {"error": f"{type(error).__name__}: {first_line}"}


def contender_command(*flags: str) -> list[str]:
    """Return the command of a contender's process, without its name and shape."""
    return [sys.executable, str(BENCH_STEP), *flags, "--contender"]


def selected(settings, *names: str) -> dict:
    """Return {name: value} of these settings."""
    return {name: getattr(settings, name) for name in names}


def compare_steps(seconds: list[float], ours: list[float], tokens: int) -> dict:
    """Return a contender's step times, its tokens/s at `tokens` tokens per step, and the ratio of our time to its time.

    The ratio is the median over turns: in each turn, a slow machine slows down both contenders.
    """
    times = step_times(seconds)
    return times | {
        "tokens_per_s": tokens / times["step_s"],
        "ours_over_this": statistics.median(a / b for a, b in zip(ours, seconds, strict=True)),
    }


def import_torch():
    """Return PyTorch and torch_gpt2.py. Raise ContenderError if PyTorch is not installed."""
    try:
        import torch

        from scripts.step_bench import torch_gpt2
    except ImportError:
        raise ContenderError("--vs torch needs PyTorch: pip install torch (the project itself does not)") from None
    return torch, torch_gpt2
