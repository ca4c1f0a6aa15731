"""The CPU cores of one rank: blocks of work, and matrix products, over Python threads.

The compiled loops and NumPy's products release the interpreter lock, so plain threads run in parallel. BLAS is limited
to one thread, and products are cut here, for two reasons. OpenBLAS's own threads keep spinning for 0.1 s after a
product, on the cores that the elementwise work after it needs. And a thread that has computed a block of a product can
finish it (bias, GELU) while it is in its cache.
"""

import math
import threading
from functools import partial
from queue import SimpleQueue

import numpy as np
from threadpoolctl import ThreadpoolController

# Operations of a product between two calls of `meanwhile`: some milliseconds. A link of 1.6 Gbit/s sends a socket's
# buffer in 12 ms, and then idles until the next call.
PIECE_OPERATIONS = 8e8
LEAST_PIECE = 256  # rows or columns


class Cores:
    """`threads` threads of this process, one of which is the calling thread. Products have the dtype of their arrays.

    operand_dtype: the dtype of activations that are only operands of products; None for the dtype of parameters.
    how: how products are computed. meanwhile(), unless None: called between pieces of long products, by the
    calling thread, so that communication makes progress.
    """

    operand_dtype = None
    how = "BLAS"
    meanwhile = None

    def __init__(self, threads: int):
        self.threads = threads
        self._work = [SimpleQueue() for _ in range(threads - 1)]
        self._done = SimpleQueue()
        for work in self._work:
            threading.Thread(target=_serve, args=(work, self._done), daemon=True).start()
        self._thread_local = threading.local()
        for library in ThreadpoolController().lib_controllers:
            if library.user_api == "blas":
                library.set_num_threads(1)

    def scratch(self, name: str, shape, dtype) -> np.ndarray:
        """Return an uninitialized array. It belongs to the calling thread until its next request for the same name."""
        buffers = self._thread_local.__dict__
        needed_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in buffers or buffers[name].nbytes < needed_bytes:
            buffers[name] = np.empty(needed_bytes, np.uint8)
        return buffers[name][:needed_bytes].view(dtype).reshape(shape)

    def for_parts(self, count: int, work) -> None:
        """Call work(start, stop) on each thread for one contiguous part of [0, count)."""
        parts = min(self.threads, count)
        if parts <= 1:
            return work(0, count)
        cuts = [count * part // parts for part in range(parts + 1)]
        for part, queue in enumerate(self._work[: parts - 1], 1):
            queue.put(partial(work, *cuts[part : part + 2]))
        try:
            work(cuts[0], cuts[1])
        finally:
            ended = [self._done.get() for _ in range(parts - 1)]
            errors = [error for error in ended if error is not None]
        if errors:
            raise errors[0]

    def matmuls(self, *products) -> None:
        """Compute independent products (a, b, out, finish), out (rows, columns) = a @ b, at the same time.

        They are cut into as many parts as keep all threads busy; two products on two threads stay whole. Cutting the
        longer side of `out` packs less data twice. finish: as in multiply, or None.
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
        """Return the number of pieces of a thread's part of a product: few, as each packs an operand again."""
        if self.meanwhile is None:
            return 1
        pieces = 2 * a.shape[1] * out.size / PIECE_OPERATIONS
        return max(1, int(min(pieces, max(out.shape) / LEAST_PIECE) / parts))

    def multiply(self, a, b, out, rows: slice, columns: slice, finish) -> None:
        """Compute these rows and columns of out = a @ b on the calling thread.

        finish(result, rows, columns), unless None, is called once result[:, columns] holds the block, in float32 or in
        the dtype of `out` if that is wider. It changes the block in place; then the block goes to `out`.
        """
        np.matmul(a[rows], b[:, columns], out=out[rows, columns])
        if finish is not None:
            finish(out[rows], rows, columns)

    def matmul(self, a, b, out, add: bool = False) -> None:
        """Set out (heads, rows, columns) = a (heads, rows, k) @ b (heads, k, columns), or `add` it, on this thread."""
        if not add:
            np.matmul(a, b, out=out)
        else:
            out += np.matmul(a, b, out=self.scratch("product", out.shape, out.dtype))

    def near(self, name: str, array) -> np.ndarray:
        """Copy the array to contiguous scratch of that name, for fast products."""
        copy = self.scratch(name, array.shape, array.dtype)
        copy[:] = array
        return copy

    def exact(self, name: str, array) -> np.ndarray:
        """Return the array in the dtype of sums, float32 at least: itself, or a copy in scratch of that name."""
        return array

    def as_operand(self, array) -> np.ndarray:
        """Return the array rounded as operands of products are, in its own dtype."""
        return array

    def store(self, out, values) -> None:
        """Copy values to out, rounded if `out` is narrower."""
        out[:] = values


def _serve(work: SimpleQueue, done: SimpleQueue) -> None:
    """Run the work that arrives, and report what it raised, or None. Starts 0.1 ms sooner than concurrent.futures."""
    while True:
        error = None
        try:
            work.get()()
        except BaseException as raised:
            error = raised
        done.put(error)


def _parts(parts: int, rows: int, columns: int):
    """Cut a product into at most `parts` parts: two slices (rows, columns) for each."""
    longer = max(rows, columns)
    parts = min(parts, longer)
    cuts = [slice(longer * part // parts, longer * (part + 1) // parts) for part in range(parts)]
    return [(slice(0, rows), cut) if rows < columns else (cut, slice(0, columns)) for cut in cuts]


def empty(cores: Cores, shape, dtype=np.float32) -> np.ndarray:
    """Return zeros, for activations, gradients or state. Writing them takes the page faults before the first step."""
    array = np.empty(shape, dtype)
    array.fill(0)
    return array


def to_host(cores: Cores, array) -> np.ndarray:
    """Return the array itself: it is in host memory."""
    return array
