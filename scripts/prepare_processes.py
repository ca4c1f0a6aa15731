"""A function over many items, in parallel processes, the results in the items' order."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from threading import Thread

from gpt2.errors import UserError

INTERRUPTS = {signal.SIGINT, signal.SIGTERM}
AHEAD = 2  # items under way for each process: one worked on, one waiting


@contextmanager
def ordered_map(processes: int):
    """A map(function, items) over that many processes, which end with the block; one is this process itself.

    It takes only so many items ahead of the results that are asked for: neither is ever held whole.
    """
    if processes == 1:
        yield map
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), follow_parent)
    try:
        yield partial(map_in_order, pool, AHEAD * processes)
    except BaseException:
        for child in multiprocessing.active_children():  # what they are at is of no use any more
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_order(pool: ProcessPoolExecutor, ahead: int, function: Callable, items: Iterable) -> Iterator:
    under_way = deque()
    try:
        for item in items:
            with uninterrupted():
                under_way.append(pool.submit(function, item))
            if len(under_way) >= ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process was ended from outside, perhaps for want of memory: run the same command again, "
            "which goes on from the last complete shard, with fewer --processes"
        ) from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block, where a process starts: cut off in that, it prints a traceback.

    Ctrl-C is blocked, too, which the process inherits: it may come before `follow_parent`. That alone is not enough
    here: a signal finds another thread of this process, such as the BLAS library's, and Python handles it in this one.
    """
    arrived = []
    handlers = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in INTERRUPTS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


def follow_parent() -> None:
    """Ctrl-C is the parent's to handle; when it is gone, however it ended, so is this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
