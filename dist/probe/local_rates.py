"""How fast the ranks of a node pass and add vectors, while all ranks are at it: measured, for the cost model.

Where ranks that wait in MPI share cores with those that work, an addition takes many times as long as on a free core.
"""

import statistics
import time

import numpy as np

from dist.mpi import MPI
from dist.world import World

BYTES, ROUNDS = 8 << 20, 5


def probe_local_rates(world: World) -> dict[str, float]:
    """{"local_rate", "local_reduce_rate", "add_rate"}, bytes/s of the slowest node: cost_model.Cluster's. Collective.

    Medians of MPI_Bcast and MPI_Reduce to a node's first rank, and of NumPy's addition; without two ranks on a node
    add_rate alone.
    """
    vector, other = np.ones(BYTES // 4, np.float32), np.ones(BYTES // 4, np.float32)
    comm, seconds = world.local_comm, {"local_rate": [], "local_reduce_rate": [], "add_rate": []}
    for _ in range(ROUNDS + 1):
        world.comm.Barrier()  # waiting ranks spin, as they do in an exchange
        seconds["local_rate"].append(_timed(lambda: comm.Bcast(vector)))
        world.comm.Barrier()
        seconds["local_reduce_rate"].append(_timed(lambda: comm.Reduce(vector, other)))
        world.comm.Barrier()
        seconds["add_rate"].append(_timed(lambda: np.add(vector, other, out=vector)))
        vector.fill(1.0)
    shares = world.comm.allreduce(world.local_size, MPI.MAX) > 1
    own = [statistics.median(values[1:]) for values in seconds.values()]
    slowest = [world.comm.allreduce(value, MPI.MAX) for value in own]
    rates = {name: BYTES / value for name, value in zip(seconds, slowest, strict=True)}
    return rates if shares else {"add_rate": rates["add_rate"]}


def _timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
