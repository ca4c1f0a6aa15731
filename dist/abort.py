"""An exception on one rank ends the job on all ranks, within a moment.

Without this, a rank that dies of an exception waits in MPI_Finalize for the others, who wait for it in a collective.
"""

import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress

USER_MISTAKE = 2  # exit code, as argparse's
PRINTING_S = 0.3  # a launcher that is told to abort may drop what it has not passed on yet
ABORTING_S = 3.0  # an MPI_Abort may wait for what hangs; a rank that exits ends the job too


def install_abort_hook(comm, mistakes: tuple[type[Exception], ...] = ()) -> None:
    """From here on an uncaught exception prints rank, host and traceback and calls MPI_Abort, under any launcher.

    Of the types in `mistakes`, which are not the program's, the text is all there is to say.
    """

    def abort(kind, error, trace):
        where = f"rank {comm.rank} of {comm.size} on {socket.gethostname()}"
        sys.stdout.flush()
        if isinstance(error, mistakes):
            end_job(comm, f"error: {error} ({where})\n", USER_MISTAKE)
        what = "".join(traceback.format_exception_only(error)).strip()
        end_job(comm, f"{where} ends the job: {what}\n{''.join(traceback.format_exception(kind, error, trace))}")

    sys.excepthook = abort


def end_job(comm, text: str, code: int = 1) -> None:
    """Print the text and end all ranks, from any thread of any rank. Does not return."""
    with suppress(OSError):  # who would read it may be gone
        sys.stderr.write(text)
        sys.stderr.flush()
    time.sleep(PRINTING_S)
    # mpi4py keeps Python's lock in Abort: no thread of ours could do anything if that hangs, but the kernel can.
    signal.setitimer(signal.ITIMER_REAL, ABORTING_S)
    comm.Abort(code)
    # MPI_Abort may return for a moment under some launchers; nothing of this rank must run after it.
    os._exit(code)
