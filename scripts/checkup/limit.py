"""An end for a process that hangs, wherever it hangs."""

import faulthandler
import os
import socket
import sys
import threading

LAST_RESORT_S = 5.0


class TimeLimit:
    """From here on this process has `seconds`; then it says what it was doing, its `stage`, and ends with code 1."""

    def __init__(self, seconds: float):
        self.stage, self._seconds = "starting", seconds
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        # A library's start may hold the interpreter, and no thread of Python's runs: this one is none.
        faulthandler.dump_traceback_later(seconds + LAST_RESORT_S, exit=True)

    def _end(self) -> None:
        host, process = socket.gethostname(), os.getpid()
        text = f"doctor: will fail: {host}, process {process}: not done after {self._seconds:g} s, while {self.stage}"
        print(text, file=sys.stderr, flush=True)
        os._exit(1)
