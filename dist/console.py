"""What a program says on stdout and stderr, whatever lies behind them.

That may be a full disk, a pipe that nobody reads any more, or a terminal with an alphabet of its own.

A job says it by `say`, as nobody's progress lines are worth a training. Every program begins with open_console.
"""

import atexit
import os
import sys
import warnings
from contextlib import suppress

USER_MISTAKE = 2  # exit code, as argparse's
BY_CTRL_C = 130  # exit code: what a shell says of a program that Ctrl-C ended
UNWRITTEN = 1  # exit code: what was printed is not where it was to be
_is_said = False  # whether stdout has lines that nobody need read


def open_console() -> None:
    """What stdout's encoding lacks is printed as "?" from here on; a program whose output nobody takes ends in silence.

    A full disk behind stdout is one line on stderr. Of a job, install_abort_hook of dist/world.py has the last word.
    NumPy's warnings of numbers that overflow are not printed, by each rank and thread: whoever checks the loss, the
    norm or the logits says in one line that they are no numbers.
    """
    warnings.filterwarnings("ignore", "(overflow|invalid value|divide by zero) encountered", RuntimeWarning)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # none at all (">&-"), or a test's
            stream.reconfigure(errors="replace")
    atexit.register(_drop_unwritten)
    sys.excepthook = _end_quietly


def say(*text, end: str = "\n", on_stderr: bool = False) -> None:
    """print, at once. What cannot be written is written with the next line that can be, or lost."""
    global _is_said
    _is_said |= not on_stderr
    stream, line = sys.stderr if on_stderr else sys.stdout, " ".join(map(str, text))
    with suppress(OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: there is none
        try:
            print(line, end=end, file=stream, flush=True)
        except UnicodeError:  # where nobody called open_console
            shown = line.encode(stream.encoding, "replace").decode(stream.encoding)
            print(shown, end=end, file=stream, flush=True)


def _end_quietly(kind, error, trace) -> None:
    """The excepthook: an error that is stdout's own is no traceback. Python exits with code 1 after it."""
    # An error of a file that was opened by its name has that name.
    problem = _flush(sys.stdout, b"\n") if isinstance(error, OSError) and error.filename is None else None
    if problem is None:
        sys.__excepthook__(kind, error, trace)
    elif not isinstance(problem, BrokenPipeError):
        _complain(problem)


def _drop_unwritten() -> None:
    """At the end, what a stream holds and cannot write goes nowhere: Python would complain, and exit with code 120.

    Of what was printed, and not said, somebody may want to know: that is another code, unless he reads no more.
    """
    problem = _flush(sys.stdout)
    for stream in (sys.stdout, sys.stderr):
        if _flush(stream) is not None:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if problem is not None and not _is_said and not isinstance(problem, BrokenPipeError):
        _complain(problem)
        os._exit(UNWRITTEN)  # all else that is to be done at the end was registered later, and is done


def _complain(problem: OSError) -> None:
    global _is_said
    _is_said = True
    say(f"error: standard output: {problem.strerror}: write it elsewhere", on_stderr=True)


def _flush(stream, probe: bytes = b"") -> OSError | None:
    """What keeps a stream from writing what it holds, and then the probe, if anything does."""
    try:
        with suppress(ValueError, AttributeError):
            stream.flush()
            if probe:  # an unbuffered stream holds nothing
                os.write(stream.fileno(), probe)
    except OSError as problem:
        return problem
    return None
