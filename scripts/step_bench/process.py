"""A contender of bench_step.py is a process of its own, which measures when it is asked and is idle otherwise.

Requests and answers are a line of JSON each: {"do": "step", ...} names one of the functions that the contender's maker
returned, the rest are its arguments; the answer is what it returns, or {"error": text}, after which the process ends.
"""

import json
import os
import select
import subprocess
import sys
import traceback
from contextlib import suppress


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
    """A contender's main(): answers requests until there are no more. makers[name] of the shape, which is JSON, returns
    its functions by name."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not come between the answers
    try:
        functions = makers[name](json.loads(shape))
        for line in sys.stdin:
            request = json.loads(line)
            answer = functions[request.pop("do")](**request)
            print(json.dumps(answer), file=answers, flush=True)
    except ContenderError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
    except Exception as error:  # of any library: the others are measured all the same
        traceback.print_exc()
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        print(json.dumps({"error": f"{type(error).__name__}: {first_line}"}), file=answers, flush=True)
