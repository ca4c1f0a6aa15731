"""Output to stdout and stderr that survives a full disk, a closed pipe, or a terminal with another encoding.

A training prints with `say`, because a lost progress line must not end it. Every program begins with open_console.
"""

import atexit
import os
import sys
import warnings
from contextlib import suppress

USER_MISTAKE = 2  # exit code, as argparse's
BY_CTRL_C = 130  # exit code, as shells report a program that Ctrl-C ended
UNWRITTEN = 1  # exit code: some output could not be written
_is_said = False  # whether stdout has lines that may be lost


def open_console() -> None:
    """Print "?" for characters that stdout's encoding lacks, and end silently when nobody reads the output.

    A full disk behind stdout is one line on stderr. In a job, install_abort_hook of dist/world.py replaces this.
    Silence NumPy's warnings of overflow on each rank and thread: checks of the loss, the norm and the logits report
    values that are not finite in one line.
    """
    warnings.filterwarnings("ignore", "(overflow|invalid value|divide by zero) encountered", RuntimeWarning)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # none at all (">&-"), or a test's
            stream.reconfigure(errors="replace")
    atexit.register(_drop_unwritten)
    sys.excepthook = _end_quietly


def say(*text, end: str = "\n", on_stderr: bool = False) -> None:
    """Print at once. Text that cannot be written is written with a later line, or lost."""
    global _is_said
    _is_said |= not on_stderr
    stream = sys.stderr if on_stderr else sys.stdout
    line = " ".join(map(str, text))
    with suppress(OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: there is none
        try:
            print(line, end=end, file=stream, flush=True)
        except UnicodeError:  # where nobody called open_console
            shown = line.encode(stream.encoding, "replace").decode(stream.encoding)
            print(shown, end=end, file=stream, flush=True)


def _end_quietly(kind, error, trace) -> None:
    """Print no traceback for an error of stdout itself: an excepthook. Python then exits with code 1."""
    # The error of a file that was opened by name has that name; stdout's has none.
    problem = _flush(sys.stdout, b"\n") if isinstance(error, OSError) and error.filename is None else None
    if problem is None:
        sys.__excepthook__(kind, error, trace)
    elif not isinstance(problem, BrokenPipeError):
        _complain(problem)


def _drop_unwritten() -> None:
    """Drop what a stream holds and cannot write: Python would complain at exit, and exit with code 120.

    If lost output was printed rather than said, exit with UNWRITTEN, unless the reader closed the pipe.
    """
    problem = _flush(sys.stdout)
    for stream in (sys.stdout, sys.stderr):
        if _flush(stream) is not None:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if problem is not None and not _is_said and not isinstance(problem, BrokenPipeError):
        _complain(problem)
        os._exit(UNWRITTEN)  # all other exit handlers were registered later, and have run


def _complain(problem: OSError) -> None:
    global _is_said
    _is_said = True
    say(f"error: standard output: {problem.strerror}: write it elsewhere", on_stderr=True)


def _flush(stream, probe: bytes = b"") -> OSError | None:
    """Write what a stream holds, and then the probe; return the error, if any."""
    try:
        with suppress(ValueError, AttributeError):
            stream.flush()
            if probe:  # an unbuffered stream holds nothing
                os.write(stream.fileno(), probe)
    except OSError as problem:
        return problem
    return None
