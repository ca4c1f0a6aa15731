"""Sums over the parts of a stage (dist/parts.py) beside MPI_Allreduce: milliseconds, and how many times as fast.

mpirun -n 2 python scripts/bench_parts.py --bytes 32KB,3MB
mpirun -n 4 python scripts/bench_parts.py --json parts.json

The table has a line for each size, with milliseconds of

    in place    rows that were written into the shared memory, as the model's products are
    copied      rows that lie elsewhere
    messages    around a ring, as where parts lie on several nodes
    MPI         MPI_Allreduce

and how many times the time of "in place" MPI takes. They take turns: each turn is --calls calls of one, one after
another; the numbers are medians over --repeat turns of the slowest rank. Every first sum is checked.
"""

import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from dist.console import open_console
from dist.mpi import MPI
from dist.parts import RingParts, SharedParts
from dist.world import end_with_one_line, library_name, start_world
from gpt2.errors import UserError
from gpt2.files import place_of_file, write_json
from scripts.exchange_bench.table import aligned
from scripts.exchange_bench.values import fill, is_filled, rank_values, summed_values
from scripts.machine.host import machine, versions
from scripts.settings.training import OneLineParser
from scripts.settings.units import repetitions, sizes

IN_PLACE, LIBRARY = "in place", "MPI"
WIDTH = 64  # elements of a row


def main():
    settings = parse()
    world = start_world()
    if world.node_count > 1:
        end_with_one_line(world.comm, f"{world.node_count} nodes, expected one: these sums are made in shared memory")
    with world.together(UserError):
        if world.rank == 0 and settings.json:
            place_of_file(settings.json)
    rows = [measured(world, size, settings.calls, settings.repeat) for size in settings.bytes]
    facts = {
        "machine": machine(),
        "versions": versions("numpy", "mpi4py"),
        "mpi_library": library_name(),
        "ranks": world.size,
    }
    world.print(text(rows, facts))
    with world.together(UserError):
        if world.rank == 0 and settings.json:
            write_json(settings.json, {"calls": settings.calls, "repeat": settings.repeat, "rows": rows} | facts)


def parse():
    parser = OneLineParser(__doc__)
    add = parser.add_argument
    add("--bytes", type=sizes, default="32KB,3MB", metavar="D[,D2]", help="of the rows in float32 (%(default)s)")
    add("--calls", type=repetitions, default=10, metavar="N", help="calls of a turn, one after another (%(default)s)")
    add("--repeat", type=repetitions, default=21, metavar="R", help="turns of each, after one that is not counted (21)")
    add("--json", type=Path, metavar="FILE", help="write what was measured to this file")
    return parser.parse_args()


def measured(world, size_bytes: int, calls: int, repeat: int) -> dict:
    """Median seconds of a call of each contender, and of MPI's over those of "in place", turn by turn. Collective."""
    rows = np.empty((max(1, -(-size_bytes // (4 * WIDTH))), WIDTH), np.float32)
    fill(rows.reshape(-1), rank_values(world.rank, world.size))
    shared, ring = (kind(world, rows.size, no_phase) for kind in (SharedParts, RingParts))
    room, received = shared.room(rows.shape), np.empty_like(rows)
    room[:] = rows

    def library():
        world.comm.Allreduce(rows, received)
        return received

    contenders = {
        IN_PLACE: lambda: shared.sum(room), "copied": lambda: shared.sum(rows), "messages": lambda: ring.sum(rows),
        LIBRARY: library,
    }  # fmt: skip
    for name, call in contenders.items():
        check(world, name, call())
    turns = [{name: seconds_of(world, call, calls) for name, call in contenders.items()} for _ in range(repeat + 1)][1:]
    shared.close()
    return {
        "bytes": rows.nbytes,
        "seconds": {name: statistics.median(turn[name] for turn in turns) for name in contenders},
        "ratio": statistics.median(turn[LIBRARY] / turn[IN_PLACE] for turn in turns),
    }


def no_phase(name: str, bytes: int):
    return nullcontext()


def seconds_of(world, call, calls: int) -> float:
    """Of one call, on the slowest rank."""
    world.comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return world.comm.allreduce(time.perf_counter() - start, MPI.MAX) / calls


def check(world, name: str, total: np.ndarray) -> None:
    """The sums are whole numbers (exchange_bench/values.py)."""
    if not is_filled(total.reshape(-1), summed_values([True] * world.size)):
        raise AssertionError(f"{name}, {total.nbytes} bytes: wrong sums on rank {world.rank}")


def text(rows: list[dict], facts: dict) -> str:
    names = list(rows[0]["seconds"])
    lines = [["KB", *(f"{name}, ms" for name in names), f"{LIBRARY} / {IN_PLACE}"]]
    for row in rows:
        times = [f"{row['seconds'][name] * 1e3:.3f}" for name in names]
        lines.append([f"{row['bytes'] / 1e3:.4g}", *times, f"{row['ratio']:.2f}"])
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{aligned(lines)}\n\n{facts['ranks']} ranks, {facts['mpi_library']}, {packages}"


if __name__ == "__main__":
    open_console()
    main()
