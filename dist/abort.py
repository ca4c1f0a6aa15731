"""An exception on one rank ends the job on all ranks, within a moment.

Without this, a rank that dies of an exception waits in MPI_Finalize for the others, who wait for it in a collective.
"""

import os
import socket
import sys
import time
import traceback

PRINTING_S = 0.3  # a launcher that is told to abort may drop what it has not passed on yet


def install_abort_hook(comm) -> None:
    """From here on an uncaught exception prints rank, host and traceback and calls MPI_Abort, under any launcher."""

    def abort(kind, error, trace):
        lines = traceback.format_exception(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.write(f"rank {comm.rank} of {comm.size} on {socket.gethostname()} ends the job:\n{''.join(lines)}")
        sys.stderr.flush()
        time.sleep(PRINTING_S)
        comm.Abort(1)
        # MPI_Abort may return for a moment under some launchers; nothing of this rank must run after it.
        os._exit(1)

    sys.excepthook = abort
