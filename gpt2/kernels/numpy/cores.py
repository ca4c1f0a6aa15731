"""The CPU cores one rank may use: blocks of work, and matrix products, over Python threads.

The compiled loops and NumPy's products release the interpreter lock, so plain threads run in parallel. BLAS is held to
one thread for good, and products are cut here, for two reasons. OpenBLAS's own threads go on spinning for 0.1 s after a
product, on the cores that the elementwise work after it needs. And the thread that has made a part of a product can
finish it (bias, GELU) while it is in its cache.
"""

import math
import threading
from functools import partial
from queue import SimpleQueue

import numpy as np
from threadpoolctl import ThreadpoolController

# Of a product between two calls of `meanwhile`: some milliseconds. What a socket takes in at once is through a link of
# 1.6 Gbit/s in 12 ms; then it idles until somebody looks.
PIECE_OPERATIONS, LEAST_PIECE = 8e8, 256  # the latter: rows or columns


class Cores:
    """`threads` threads of this process. The calling thread is one of them. Products are of the dtype of the arrays.

    operand_dtype: what activations are kept in that are only ever operands of products; None for the parameters'.
    how: what makes the products, in words. meanwhile(), if not None, is called by the calling thread between pieces of
    long products, so that what else is under way in this process moves on.
    """

    operand_dtype = None
    how = "BLAS"
    meanwhile = None

    def __init__(self, threads: int):
        self.threads = threads
        self._workers = [_Worker() for _ in range(threads - 1)]
        self._thread_local = threading.local()
        for library in ThreadpoolController().lib_controllers:
            if library.user_api == "blas":
                library.set_num_threads(1)

    def scratch(self, name: str, shape, dtype) -> np.ndarray:
        """An uninitialized array that belongs to the calling thread until it asks for the same name again."""
        buffers = self._thread_local.__dict__
        needed_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in buffers or buffers[name].nbytes < needed_bytes:
            buffers[name] = np.empty(needed_bytes, np.uint8)
        return buffers[name][:needed_bytes].view(dtype).reshape(shape)

    def for_parts(self, count: int, work) -> None:
        """Call work(start, stop) for one contiguous part of [0, count) a thread."""
        parts = min(self.threads, count)
        if parts <= 1:
            return work(0, count)
        cuts = [count * part // parts for part in range(parts + 1)]
        workers = self._workers[: parts - 1]
        for part, worker in enumerate(workers, 1):
            worker.start(partial(work, *cuts[part : part + 2]))
        try:
            work(cuts[0], cuts[1])
        finally:
            errors = [error for error in [worker.wait() for worker in workers] if error is not None]
        if errors:
            raise errors[0]

    def for_blocks(self, count: int, block: int, work) -> None:
        """Call work(start, stop) for pieces of at most `block` that cover [0, count), one contiguous part a thread."""

        def part(start, stop):
            for low in range(start, stop, block):
                work(low, min(low + block, stop))

        self.for_parts(count, part)

    def matmuls(self, *products) -> None:
        """Independent products (a, b, out, finish), out (rows, columns) = a @ b, all at once.

        They are cut into as many parts as keep all threads busy; two products on two threads stay whole. The longer
        side of `out` is cut, since that packs less of a and b twice. finish: as multiply calls it, or None.
        """
        parts = self.threads // len(products) if self.threads % len(products) == 0 else self.threads
        tasks = [
            partial(self.multiply, a, b, out, *part, finish)
            for a, b, out, finish in products
            for part in _parts(parts * self._pieces(a, out, parts), *out.shape)
        ]

        def some_tasks(start, stop):
            for task in tasks[start:stop]:
                task()
                if start == 0 and self.meanwhile is not None:
                    self.meanwhile()

        self.for_parts(len(tasks), some_tasks)

    def _pieces(self, a, out, parts: int) -> int:
        """In how many pieces a thread's part of a product is made: as few as will do, since each packs an operand."""
        if self.meanwhile is None:
            return 1
        pieces = 2 * a.shape[1] * out.size / PIECE_OPERATIONS
        return max(1, int(min(pieces, max(out.shape) / LEAST_PIECE) / parts))

    def multiply(self, a, b, out, rows: slice, columns: slice, finish) -> None:
        """That part of out = a @ b, by the calling thread.

        finish(result, rows, columns), where not None, is called as soon as result[:, columns] holds these rows and
        columns of the product: float32, or the dtype of `out` where that is wider. What it makes of them goes to `out`.
        """
        np.matmul(a[rows], b[:, columns], out=out[rows, columns])
        if finish is not None:
            finish(out[rows], rows, columns)

    def matmul(self, a, b, out, add: bool = False) -> None:
        """out (heads, rows, columns) = or, if `add`, += a (heads, rows, k) @ b (heads, k, columns), by this thread."""
        if not add:
            np.matmul(a, b, out=out)
        else:
            out += np.matmul(a, b, out=self.scratch("product", out.shape, out.dtype))

    def near(self, name: str, array) -> np.ndarray:
        """The array as products with it run best: in scratch of that name, one row behind the other."""
        copy = self.scratch(name, array.shape, array.dtype)
        copy[:] = array
        return copy

    def exact(self, name: str, array) -> np.ndarray:
        """The array in the dtype of sums, float32 at least: itself, or in scratch of that name."""
        return array

    def as_operand(self, array) -> np.ndarray:
        """The numbers that products make of the array's, in its dtype."""
        return array

    def store(self, out, values) -> None:
        """out = values, rounded where `out` is narrower."""
        out[:] = values


class _Worker:
    """A thread that does what it is given. It starts a tenth of a millisecond sooner than with concurrent.futures."""

    def __init__(self):
        self._work, self._done = SimpleQueue(), SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def start(self, work) -> None:
        self._work.put(work)

    def wait(self) -> BaseException | None:
        """What the work raised, or None, once it has ended."""
        return self._done.get()

    def _serve(self) -> None:
        while True:
            work, error = self._work.get(), None
            try:
                work()
            except BaseException as raised:
                error = raised
            self._done.put(error)


def _parts(parts: int, rows: int, columns: int):
    """A product's (rows, columns), two slices, of each of so many parts, or as many as have something."""
    longer = max(rows, columns)
    parts = min(parts, longer)
    cuts = [slice(longer * part // parts, longer * (part + 1) // parts) for part in range(parts)]
    return [(slice(0, rows), cut) if rows < columns else (cut, slice(0, columns)) for cut in cuts]


def empty(cores: Cores, shape, dtype=np.float32) -> np.ndarray:
    """Zeros, for activations, gradients or state: written here, so that no later step meets the page faults."""
    array = np.empty(shape, dtype)
    array.fill(0)
    return array


def to_host(cores: Cores, array) -> np.ndarray:
    """The array itself: it is in host memory."""
    return array
