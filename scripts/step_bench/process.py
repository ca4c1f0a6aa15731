"""Run the contenders of bench_step.py as processes: requests and answers.

Each contender has its own process, which measures on request and is idle otherwise. A request is a line with a number
of steps. The answer is a line of JSON: what the contender's function steps(count) returns, or {"error": text}.
"""

import json
import os
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from gpt2.errors import UserError
from scripts.machine.names import error_text

COMMAND = [sys.executable, str(Path(__file__).parent.parent / "bench_step.py"), "--contender"]


class ContenderError(Exception):
    """A contender could not start or ended early. The message is one line."""


class ContenderProcess:
    """bench_step.py's handle of a contender's process. command: the command line, without name and shape."""

    def __init__(self, command: list[str], name: str, shape: dict):
        self.name = name
        command = [*command, name, json.dumps(shape)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, count: int) -> dict:
        """Return the answer to a request for `count` steps. Raise ContenderError for an error."""
        with suppress(BrokenPipeError):  # the process has ended; the code below reads its last answer
            print(count, file=self.process.stdin, flush=True)
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

    makers[name](shape) returns the contender's function steps(count); `shape` is parsed from JSON.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries must not print between the answers
    steps = None
    for line in sys.stdin:
        try:
            steps = steps or makers[name](json.loads(shape))
            answer = steps(int(line))
        except UserError as error:
            answer = {"error": str(error)}
        except Exception as error:  # any library may raise; the other contenders are still measured
            traceback.print_exc()
            answer = {"error": error_text(error)}
        print(json.dumps(answer), file=answers, flush=True)
