"""Map a function over many items in parallel processes; results come in the order of the items.

concurrent.futures does not fit because its processes share two pipes and their locks. If a process is killed while it
sends a result (memory may be short), the pool waits for ever. If this process is killed, the others live on. Here each
process has its own pipe and shares no lock. When either side of a pipe ends, the other side notices.
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
from scripts.cluster.program import undisturbed

INTERRUPTS = {signal.SIGINT, signal.SIGTERM}
AHEAD = 2  # items that a process has at once: one being computed, one waiting


@contextmanager
def ordered_map(processes: int):
    """Yield a map(function, items) over new processes, which end with the block. With processes=1, yield Python's map.

    The map reads at most 2 AHEAD items per process beyond the results taken, so it never holds all. If the
    function raises for an item, the exception is raised at the item's turn. If a process dies, UserError is raised.
    """
    if processes == 1:
        yield map
        return
    resource_tracker.ensure_running()  # otherwise start() starts it, which unblocks SIGINT too early
    workers = []
    try:
        with undisturbed(INTERRUPTS):  # on Ctrl-C the new processes would print a traceback
            # The processes inherit a blocked SIGINT, which may arrive before `work` ignores it. In this process another
            # thread could still receive it, so blocking alone would not delay it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                workers += [start() for _ in range(processes)]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield partial(map_in_order, [connection for _, connection in workers])
    finally:
        for process, connection in workers:
            connection.close()
            process.kill()
            process.join()


def start() -> tuple[multiprocessing.Process, Connection]:
    """Start a process that waits for work. Return the process and this end of its pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def map_in_order(connections: list[Connection], function: Callable, items: Iterable) -> Iterator:
    """Yield the results of all items in order. Raise an item's error at its turn, UserError if a process has ended."""
    numbered = enumerate(items)
    free = deque(connections * AHEAD)
    limit = 2 * AHEAD * len(connections)
    done = {}
    given = 0
    returned = 0
    try:
        while True:
            for number, item in islice(numbered, min(len(free), limit - (given - returned))):
                free.popleft().send((number, function, item))
                given += 1
            if returned == given:
                return
            if returned not in done:
                for connection in wait(connections):
                    number, *outcome = connection.recv()
                    done[number] = outcome
                    free.append(connection)
                continue
            result, error = done.pop(returned)
            if error:
                raise error
            yield result
            returned += 1
    except (EOFError, ConnectionError) as error:
        raise UserError(
            "a process was ended from outside, perhaps for want of memory: run the same command again, "
            "which goes on from the last complete shard, with fewer --processes"
        ) from error


def work(connection: Connection) -> None:
    """Answer each (number, function, item) with (number, result, error) until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    waiting = queue.SimpleQueue()
    Thread(target=receive, args=(connection, waiting), daemon=True).start()
    while True:
        number, function, item = waiting.get()
        try:
            outcome = number, function(item), None
        except Exception as error:
            error.add_note(traceback.format_exc())
            outcome = number, None, error
        with suppress(OSError):  # the other end is closed; `receive` sees that
            connection.send(outcome)


def receive(connection: Connection, waiting: queue.SimpleQueue) -> None:
    """Receive items while `work` computes, so that the sender does not wait. End this process when the sender ends."""
    try:
        while True:
            waiting.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)
