"""An exception on one rank ends the job on all ranks, within a moment.

Without this, a rank that dies of an exception waits in MPI_Finalize for the others, who wait for it in a collective.
"""

import os
import socket
import sys
import threading
import time
import traceback

PRINTING_S = 0.3  # a launcher that is told to abort may drop what it has not passed on yet
ABORTING_S = 3.0  # an MPI_Abort may wait for what hangs; a rank that exits ends the job too


def install_abort_hook(comm) -> None:
    """From here on an uncaught exception prints rank, host and traceback and calls MPI_Abort, under any launcher."""

    def abort(kind, error, trace):
        lines = traceback.format_exception(kind, error, trace)
        sys.stdout.flush()
        end_job(comm, f"rank {comm.rank} of {comm.size} on {socket.gethostname()} ends the job:\n{''.join(lines)}")

    sys.excepthook = abort


def end_job(comm, text: str) -> None:
    """Print the text and end all ranks, from any thread of any rank. Does not return."""
    sys.stderr.write(text)
    sys.stderr.flush()
    time.sleep(PRINTING_S)
    last_resort = threading.Timer(ABORTING_S, os._exit, [1])
    last_resort.daemon = True
    last_resort.start()
    comm.Abort(1)
    # MPI_Abort may return for a moment under some launchers; nothing of this rank must run after it.
    os._exit(1)
