"""What a reduction operation of our own costs in MPI's collectives: how often it is called, with what, and how long.

mpirun -n 4 python scripts/bench_operation.py --bytes 1MB,64MB
mpirun -n 4 python scripts/bench_operation.py --threads 2 --json operation.json

The table has a line for each collective and size: the calls that the library makes of an operation on the rank with
most of them, the bytes that a call gets, and milliseconds of the collective with

    MPI_SUM     MPI's own
    own         ours, compiled, one thread (--op own)
    threads     the same on --threads threads
    Python      a function given to mpi4py's Op.Create, which adds by NumPy and takes the interpreter lock each time
    bfloat16    ours, on half the bytes (--wire bfloat16)

Operations take turns; each number is the median of --repeat. Every sum is checked. Below stands how far sums of numbers
like gradients are off in bfloat16, by each collective and by the ring of our own messages.
"""

import statistics
import time
from pathlib import Path

import numba
import numpy as np

from dist.console import open_console
from dist.host.exchange import RingExchange
from dist.host.operation import MpiSum, OwnSum
from dist.mpi import MPI
from dist.waiting import barrier
from dist.wire import WireFormat, round_to_bfloat16, widen
from dist.world import library_name, start_world
from gpt2.errors import UserError
from gpt2.files import place_of_file, write_json
from gpt2.kernels import check_compiles
from scripts.exchange_bench.table import aligned
from scripts.exchange_bench.values import fill, rank_values, summed_values, vector_size
from scripts.machine.host import machine, versions
from scripts.settings.training import OneLineParser
from scripts.settings.units import repetitions, sizes

COLLECTIVES = ("Reduce", "Reduce_scatter_block", "Allreduce")
ERROR_ELEMENTS = 100_000


@numba.njit(parallel=True)
def add_on_threads(added, total):
    for i in numba.prange(len(total)):
        total[i] += added[i]


class Counting:
    """Adds by NumPy, and notes the bytes of each call."""

    def __init__(self):
        self.calls = []
        self.op = MPI.Op.Create(self._add, commute=True)

    def _add(self, added, total, datatype):
        self.calls.append(len(total))
        sums = np.frombuffer(total, np.float32)
        np.add(np.frombuffer(added, np.float32), sums, out=sums)

    def close(self) -> None:
        self.op.Free()


def main():
    settings = parse()
    world = start_world()
    with world.together(UserError):
        check_compiles()
        if world.rank == 0 and settings.json:
            place_of_file(settings.json)
    numba.config.THREADING_LAYER = "workqueue"  # its threads sleep between two calls, where OpenMP's spin
    numba.set_num_threads(min(settings.threads, numba.config.NUMBA_NUM_THREADS))
    operations = {
        "MPI_SUM": MpiSum(), "own": OwnSum(), "threads": OwnSum(add=add_on_threads), "Python": Counting(),
        "bfloat16": OwnSum(bfloat16=True),
    }  # fmt: skip
    rows = [
        measured(world, name, vector_size(size, world.size), operations, settings.repeat)
        for size in settings.bytes
        for name in COLLECTIVES
    ]
    errors = bfloat16_errors(world, operations["bfloat16"].op)
    world.print(text(rows, operations))
    world.print(
        "relative error of a sum in bfloat16: " + ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
    )
    for operation in operations.values():
        operation.close()
    with world.together(UserError):
        check_compiles()
        if world.rank == 0 and settings.json:
            facts = {
                "machine": machine(),
                "versions": versions("numpy", "numba", "mpi4py"),
                "mpi_library": library_name(),
            }
            write_json(
                settings.json,
                {"ranks": world.size, "threads": settings.threads, "rows": rows, "errors": errors} | facts,
            )


def parse():
    parser = OneLineParser(__doc__)
    add = parser.add_argument
    add("--bytes", type=sizes, default="1MB,64MB", metavar="D[,D2]", help="of one vector in float32 (%(default)s)")
    add("--threads", type=int, default=2, choices=range(1, 1025), metavar="T", help="of `threads` (%(default)s)")
    add("--repeat", type=repetitions, default=5, metavar="R", help="counted calls of each, one before that is not (5)")
    add("--json", type=Path, metavar="FILE", help="write what was measured to this file")
    return parser.parse_args()


def measured(world, collective: str, size: int, operations: dict, repeat: int) -> dict:
    """The calls of one collective of `size` elements, and its median seconds with each operation. Collective."""
    seconds = {name: [] for name in operations}
    counting = operations["Python"]
    for turn in range(repeat + 1):
        for name, operation in operations.items():
            counting.calls.clear()
            taken = seconds_of(world, collective, size, operation.op, rounds=name == "bfloat16")
            if turn:
                seconds[name].append(taken)
            if name == "Python":
                calls = max(world.comm.allgather(list(counting.calls)), key=len)
    return {
        "collective": collective, "bytes": 4 * size, "calls": calls,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
    }  # fmt: skip


def seconds_of(world, collective: str, size: int, op, rounds: bool) -> float:
    """Of the slowest rank. The sums are whole numbers that bfloat16 holds (exchange_bench/values.py)."""
    vector = np.empty(size, np.float32)
    fill(vector, rank_values(world.rank, world.size))
    sent = bits_of(vector) if rounds else vector
    barrier(world.comm)
    start = time.perf_counter()
    received, first = summed(world, collective, sent, op)
    taken = world.comm.allreduce(time.perf_counter() - start, MPI.MAX)
    fill(vector, summed_values([True] * world.size))
    expected = bits_of(vector) if rounds else vector
    if not np.array_equal(received, expected[first : first + len(received)]):
        raise AssertionError(f"{collective} of {size} elements: wrong sums on rank {world.rank}")
    return taken


def summed(world, collective: str, sent: np.ndarray, op) -> tuple[np.ndarray, int]:
    """(what this rank gets of the sum, where that begins)."""
    received, block = np.empty_like(sent), len(sent) // world.size
    if collective == "Reduce":
        world.comm.Reduce(sent, received if world.rank == 0 else None, op, root=0)
        return received[: len(sent) if world.rank == 0 else 0], 0
    if collective == "Reduce_scatter_block":
        world.comm.Reduce_scatter_block(sent, received[:block], op)
        return received[:block], world.rank * block
    world.comm.Allreduce(sent, received, op)
    return received, 0


def bfloat16_errors(world, op) -> dict[str, float]:
    """Of a sum over the ranks of normally distributed numbers, root mean squares: the error over the sum. Collective.

    By each collective with our operation, and by the ring of our own messages.
    """
    size = ERROR_ELEMENTS // world.size * world.size
    own, exact = np.random.default_rng(world.rank).standard_normal(size).astype(np.float32), np.empty(size)
    world.comm.Allreduce(own.astype(np.float64), exact)
    found = {}
    for collective in COLLECTIVES:
        half, first = summed(world, collective, bits_of(own), op)
        values = np.empty(len(half), np.float32)
        widen(half, values)
        found[collective] = relative(
            world, values - exact[first : first + len(values)], exact[first : first + len(values)]
        )
    ring = RingExchange(world.comm, [(0, size)], WireFormat("bfloat16"))
    ring.start_allreduce(own, 0, size)
    ring.progress.finish()
    return found | {"ring": relative(world, own - exact, exact)}


def relative(world, errors: np.ndarray, sums: np.ndarray) -> float:
    """Root mean square of all ranks' errors over that of their sums."""
    squares = world.comm.allreduce(np.array([errors @ errors, sums @ sums]))
    return float(np.sqrt(squares[0] / squares[1]))


def bits_of(vector: np.ndarray) -> np.ndarray:
    half = np.empty(len(vector), np.uint16)
    round_to_bfloat16(vector, half)
    return half


def text(rows: list[dict], operations: dict) -> str:
    lines = [["", "MB", "calls", "MB each", *(f"{name}, ms" for name in operations)]]
    for row in rows:
        lengths = [f"{length / 1e6:.4g}" for length in (min(row["calls"], default=0), max(row["calls"], default=0))]
        each = " to ".join(dict.fromkeys(lengths))
        times = [f"{row['seconds'][name] * 1e3:.2f}" for name in operations]
        lines.append([row["collective"], f"{row['bytes'] / 1e6:.4g}", str(len(row["calls"])), each, *times])
    return aligned(lines)


if __name__ == "__main__":
    open_console()
    main()
