"""All-reduces of NumPy arrays for any program: the sum over all ranks, in place, in one call.

    allreduce = HierarchicalAllReduce(world)          # once; collective
    allreduce(gradient)                               # for each array to sum; collective

    RingAllReduce          around a ring of all ranks: 2 (N-1)/N D in and out of each; for many bytes, one rank per node
    TreeAllReduce          up and down two binary trees: 2 log2(N) dependent messages; for many ranks, few bytes
    HierarchicalAllReduce  MPI's sum in the node, a ring of the nodes' leaders, MPI's broadcast in the node: 2 (M-1)/M D
                           through a node's port; for several ranks per node

D: bytes of the array, N: ranks, M: nodes. Each sum is computed once and then passed on, so all ranks get the same bits.
For strategies, exchange.py adds ranges, overlap with compute, and bfloat16.
"""

import itertools

import numpy as np

from dist.host import host_ring, host_tree
from dist.mpi import MPI
from dist.probe.links import MOST_SEGMENT_BYTES
from dist.progress_engine import ProgressEngine
from dist.waiting import wait
from dist.wire import PlainWire
from dist.world import World

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
TAGS = 1 << 14


class AllReduce:
    """Base class of the all-reduces below. Collective: all ranks of a world make one.

    segment_bytes: of the largest message. Messages have their own communicators, separate from the program's.
    """

    def __init__(self, world: World, segment_bytes: int = MOST_SEGMENT_BYTES):
        self._wires = {dtype: PlainWire(segment_bytes, dtype) for dtype in DTYPES}
        self._progress = ProgressEngine()
        self._tags = itertools.cycle(range(1, TAGS))
        self._comm = world.comm.Dup()

    def __call__(self, array: np.ndarray) -> None:
        """Replace the array by its sum over all ranks. Collective: the same shape and dtype on all ranks.

        ValueError: the array is not float32 or float64, not contiguous, or not writeable.
        """
        if not isinstance(array, np.ndarray) or array.dtype not in DTYPES:
            raise ValueError(f"{getattr(array, 'dtype', type(array).__name__)}: expected a float32 or float64 array")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError("an array with gaps, or one that cannot be written: hand over a copy (array.copy())")
        self._sum(array.reshape(-1))

    def _sum(self, flat: np.ndarray) -> None:
        for exchange in self._exchanges(flat, self._wires[flat.dtype]):
            self._progress.start(exchange)
        self._progress.finish()

    def _exchanges(self, flat: np.ndarray, wire: PlainWire) -> list:
        raise NotImplementedError


class RingAllReduce(AllReduce):
    """Sums around a ring of all ranks."""

    def _exchanges(self, flat, wire):
        return [host_ring.allreduce(self._comm, flat, (), 0, len(flat), wire, next(self._tags))]


class TreeAllReduce(AllReduce):
    """Sums up and down two binary trees, half of the array in each."""

    def _exchanges(self, flat, wire):
        return host_tree.allreduce(self._comm, flat, 0, len(flat), wire, (next(self._tags), next(self._tags)))


class HierarchicalAllReduce(RingAllReduce):
    """Sums within each node, then around a ring of the nodes' leaders, and broadcasts within each node."""

    def __init__(self, world: World, segment_bytes: int = MOST_SEGMENT_BYTES):
        super().__init__(world, segment_bytes)
        self._local = world.local_comm.Dup()
        self._leads = self._local.rank == 0
        self._comm = world.comm.Split(0 if self._leads else MPI.UNDEFINED, world.node)

    def _sum(self, flat):
        if self._leads:
            wait(self._local.Ireduce(MPI.IN_PLACE, flat, MPI.SUM, 0))
            super()._sum(flat)
        else:
            wait(self._local.Ireduce(flat, None, MPI.SUM, 0))
        wait(self._local.Ibcast(flat, 0))
