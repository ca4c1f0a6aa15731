"""Output to stdout and stderr that survives a full disk, a closed pipe, or a terminal with another encoding.

Training prints with `say`, because a lost progress line must not end the run. Every program begins with open_console.
"""

import atexit
import os
import sys
import warnings
from contextlib import suppress

USER_MISTAKE = 2  # exit code, the same as argparse uses
BY_CTRL_C = 130  # exit code that shells report for a program that Ctrl-C ended
UNWRITTEN = 1  # exit code: some output could not be written
_is_said = False  # whether `say` printed to stdout: such lines may be lost


def open_console() -> None:
    """Print "?" for characters that stdout's encoding lacks, and end silently when nobody reads the output.

    If stdout is on a full disk, print one line on stderr. In a job, install_abort_hook of dist/world.py replaces the
    exception hook. Silence NumPy's overflow warnings, which every rank and thread would print: checks of the loss, the
    norm and the logits report non-finite values in one line.
    """
    warnings.filterwarnings("ignore", "(overflow|invalid value|divide by zero) encountered", RuntimeWarning)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # the stream is closed (">&-"), or replaced by a test
            stream.reconfigure(errors="replace")
    atexit.register(_drop_unwritten)
    sys.excepthook = _end_quietly


def say(*text, end: str = "\n", on_stderr: bool = False) -> None:
    """Print and flush. Text that cannot be written now is written with a later line, or lost."""
    global _is_said
    _is_said |= not on_stderr
    stream = sys.stderr if on_stderr else sys.stdout
    line = " ".join(map(str, text))
    with suppress(OSError, ValueError, AttributeError):  # ValueError: closed stream; AttributeError: no stream
        try:
            print(line, end=end, file=stream, flush=True)
        except UnicodeError:  # open_console was not called
            shown = line.encode(stream.encoding, "replace").decode(stream.encoding)
            print(shown, end=end, file=stream, flush=True)


def _end_quietly(kind, error, trace) -> None:
    """Exception hook: print no traceback for an error of stdout itself. Python then exits with code 1."""
    # An error on a file that was opened by name has that name; an error on stdout has none.
    problem = _flush(sys.stdout, b"\n") if isinstance(error, OSError) and error.filename is None else None
    if problem is None:
        sys.__excepthook__(kind, error, trace)
    elif not isinstance(problem, BrokenPipeError):
        _complain(problem)


def _drop_unwritten() -> None:
    """Drop buffered output that cannot be written: otherwise Python would complain and exit with code 120.

    If the lost output was printed without `say`, exit with UNWRITTEN, unless the reader closed the pipe.
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
    """Flush a stream, then write the probe; return the error, if any."""
    try:
        with suppress(ValueError, AttributeError):
            stream.flush()
            if probe:  # flushing an unbuffered stream shows no error
                os.write(stream.fileno(), probe)
    except OSError as problem:
        return problem
    return None
