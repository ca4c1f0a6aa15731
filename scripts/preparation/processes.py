"""A function over many items, in parallel processes, the results in the items' order.

Why not concurrent.futures: the processes of its pool share two pipes and their locks. When one of them is killed while
it sends a result, as happens where memory is short, the pool waits for ever for the rest of it. When this process is
killed, they live on. Here each process has a pipe of its own and shares no lock, so that the end of a process, at
whatever moment, is the end of its pipe, and both sides see it.
"""

import multiprocessing
import os
import queue
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from threading import Thread

from gpt2.errors import UserError

INTERRUPTS = {signal.SIGINT, signal.SIGTERM}
AHEAD = 2  # items given to each process: one it works on, one that waits


@contextmanager
def ordered_map(processes: int):
    """A map(function, items) over that many new processes, which end with the block. For one, it is Python's own map.

    It takes at most 2 AHEAD items a process beyond the results that were asked for: neither is ever held whole. An
    exception of the function is raised here when it is that item's turn. UserError: a process was ended from outside.
    """
    if processes == 1:
        yield map
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, and that unblocks Ctrl-C too early
    workers = []
    try:
        with uninterrupted():
            workers += [start() for _ in range(processes)]
        yield partial(map_in_order, [connection for _, connection in workers])
    finally:
        for process, connection in workers:
            connection.close()
            process.kill()
            process.join()


def start() -> tuple[multiprocessing.Process, Connection]:
    """A process that waits for work, and our end of its pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def map_in_order(connections: list[Connection], function: Callable, items: Iterable) -> Iterator:
    try:
        for result, error in outcomes(connections, function, enumerate(items)):
            if error:
                raise error
            yield result
    except (EOFError, ConnectionError) as error:
        raise UserError(
            "a process was ended from outside, perhaps for want of memory: run the same command again, "
            "which goes on from the last complete shard, with fewer --processes"
        ) from error


def outcomes(connections: list[Connection], function: Callable, numbered: Iterator[tuple]) -> Iterator[tuple]:
    """(result, error), one of them None, in the order of the numbers 0, 1, ... EOFError: a process has ended."""
    free, limit = deque(connections * AHEAD), 2 * AHEAD * len(connections)
    done, given, returned = {}, 0, 0
    while True:
        for number, item in islice(numbered, min(len(free), limit - (given - returned))):
            free.popleft().send((number, function, item))
            given += 1
        if returned == given:
            return
        if returned in done:
            yield done.pop(returned)
            returned += 1
            continue
        for connection in wait(connections):
            number, *outcome = connection.recv()
            done[number] = outcome
            free.append(connection)


def work(connection: Connection) -> None:
    """Answer (number, function, item) with (number, result, error), one by one, until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    waiting = queue.SimpleQueue()
    Thread(target=receive, args=(connection, waiting), daemon=True).start()
    while True:
        number, function, item = waiting.get()
        try:
            outcome = number, function(item), None
        except Exception as error:
            error.add_note(traceback.format_exc())
            outcome = number, None, error
        with suppress(OSError):  # nobody is there any more: `receive` sees that
            connection.send(outcome)


def receive(connection: Connection, waiting: queue.SimpleQueue) -> None:
    """Take in what is sent while an item is worked on: the sender need not wait. End this process when it is gone."""
    try:
        while True:
            waiting.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block ends. It starts processes, and one that is interrupted in that prints a
    traceback.

    The new processes inherit that Ctrl-C is blocked, since it may come before `work` ignores it. Blocking it is not
    enough in this process: a signal finds another of its threads, such as the BLAS library's, and Python then runs the
    handler in this thread. So the handlers are replaced, too.
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
