"""Run programs one after the other, each in a fork of this process, which has imported what they need.

    python tests/support/forked.py < commands.json

stdin: a JSON list of commands, each [script, word...]. stdout: a JSON list of [exit code, output].
"""

import json
import os
import runpy
import sys
import tempfile

from scripts import advise, diagnose, export, plot, sample, watch  # noqa: F401


def main():
    results = []
    for words in json.load(sys.stdin):
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                sys.exit(run(words, output))
            _, status = os.waitpid(child, 0)
            output.seek(0)
            results.append([os.waitstatus_to_exitcode(status), output.read().decode()])
    json.dump(results, sys.stdout)


def run(words: list[str], output) -> None:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
