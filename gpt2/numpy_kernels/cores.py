"""The CPU cores one rank may use: blocks of work over Python threads, and how many threads BLAS takes.

NumPy's ufuncs and products release the interpreter lock, so plain threads run blocks in parallel. A product that stands
alone is left to BLAS and its own threads; inside `for_blocks` BLAS is held to one thread, as each block has its core.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import ThreadpoolController

CACHE_BYTES = 3 << 19  # 1.5 MB: smaller blocks pay more for calls than they save in cache misses


class Cores:
    """`threads` threads of this process. The calling thread is one of them."""

    def __init__(self, threads: int):
        self.threads = threads
        self._workers = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self._thread_local = threading.local()
        self._blas = [lib for lib in ThreadpoolController().lib_controllers if lib.user_api == "blas"]
        self._set_blas_threads(threads)

    def _set_blas_threads(self, threads: int) -> None:
        for library in self._blas:
            library.set_num_threads(threads)

    def scratch(self, name: str, shape, dtype) -> np.ndarray:
        """An uninitialized array that belongs to the calling thread until it asks for the same name again."""
        buffers = self._thread_local.__dict__
        needed_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in buffers or buffers[name].nbytes < needed_bytes:
            buffers[name] = np.empty(needed_bytes, np.uint8)
        return buffers[name][:needed_bytes].view(dtype).reshape(shape)

    def for_blocks(self, count: int, block: int, work) -> None:
        """Call work(start, stop) until [0, count) is covered by pieces of at most `block`, one part a thread."""
        parts = min(self.threads, count)
        if parts <= 1:
            return _run_part(0, count, block, work)
        cuts = [count * part // parts for part in range(parts + 1)]
        self._set_blas_threads(1)
        try:
            others = [self._workers.submit(_run_part, *cuts[p : p + 2], block, work) for p in range(1, parts)]
            _run_part(cuts[0], cuts[1], block, work)
            for other in others:
                other.result()
        finally:
            self._set_blas_threads(self.threads)

    def for_rows(self, rows: int, row_bytes: int, work) -> None:
        """for_blocks with as many rows a block as keep `row_bytes` a row in cache."""
        self.for_blocks(rows, max(1, CACHE_BYTES // row_bytes), work)


def _run_part(start: int, stop: int, block: int, work) -> None:
    for low in range(start, stop, block):
        work(low, min(low + block, stop))


def empty(cores: Cores, shape, dtype=np.float32) -> np.ndarray:
    """An array for activations, gradients or state. Touched here, so that no later step meets its page faults."""
    return np.zeros(shape, dtype)
