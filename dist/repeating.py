"""Work that a thread repeats at regular intervals, until it is stopped or the process ends."""

import atexit
import threading

AT_EXIT_S = 5.0  # a file system that hangs must not keep the process from ending


class Repeating:
    """Calls work() every pause_s seconds in its own thread, first after one pause."""

    def __init__(self, work, pause_s: float, name: str):
        self._work = work
        self._pause_s = pause_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)
        self._thread.start()
        # A daemon thread that is within C++ code while the interpreter shuts down aborts the process.
        atexit.register(self.stop, AT_EXIT_S)

    def stop(self, within_s: float | None = None) -> None:
        """End the thread after the current call of work(); return after `within_s` even if that call goes on.

        work() must not call this.
        """
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(within_s)

    def _repeat(self) -> None:
        while not self._stopped.wait(self._pause_s):
            self._work()
