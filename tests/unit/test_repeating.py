"""A thread that repeats something ends before the interpreter does."""

import subprocess
import sys
import threading
import time

from dist.repeating import Repeating

ENDS_WITHOUT_STOP = """
import atexit, threading, time
from dist.repeating import Repeating

atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # called last
begun = threading.Event()
Repeating(lambda: (begun.set(), time.sleep(0.2)), 0.01, "beat")
begun.wait()
raise SystemExit(7)
"""


def test_it_repeats_until_it_is_stopped():
    times, enough = [], threading.Event()

    def work():
        times.append(time.monotonic())
        if len(times) == 3:
            enough.set()

    begun = time.monotonic()
    repeating = Repeating(work, 0.01, "three times")
    assert enough.wait(30)
    repeating.stop()
    count = len(times)
    assert times[0] - begun >= 0.009
    time.sleep(0.05)
    assert len(times) == count
    repeating.stop()  # once more does no harm


def test_stopping_does_not_wait_for_work_that_hangs():
    hanging, begun = threading.Event(), threading.Event()
    repeating = Repeating(lambda: (begun.set(), hanging.wait()), 0.01, "hangs")
    begun.wait(30)
    repeating.stop(0.05)
    hanging.set()
    repeating.stop()


def test_no_thread_is_left_when_the_interpreter_ends():
    result = subprocess.run([sys.executable, "-c", ENDS_WITHOUT_STOP], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (7, "['MainThread']\n", "")
