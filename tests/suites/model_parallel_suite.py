"""Every cut of a model over so many ranks, with every strategy, against one serial rank; and the same bits twice.

mpirun -n 4 python tests/suites/model_parallel_suite.py [--steps 10] [--shape 2,2,2] [--nodes 2]

All (copies, parts, stages) of the ranks, or one --shape, with and without overlap, under both schedules; sizes that
divide by nothing (tests/support/model_parallel.py). --nodes: as if the ranks sat on so many, dealt out in turn; without
it, on the hosts where they are. Prints the largest relative errors of parameters, losses and norms. Exit code 1: one is
beyond 1e-5, 1e-5 or 1e-4, or a second training gives other bits.
"""

import argparse

import numpy as np

from dist.world import start_world, world_of
from tests.support.model_parallel import Training, cuts, largest_errors, serial

LIMITS = 1e-5, 1e-5, 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shape", help="copies,parts,stages")
    parser.add_argument("--nodes", type=int)
    arguments = parser.parse_args()
    job = start_world()
    world = job
    if arguments.nodes:
        world = world_of(job.comm, job.comm.Split(job.rank % arguments.nodes, job.rank))
    shape = arguments.shape and tuple(map(int, arguments.shape.split(",")))
    chosen = [cut for cut in cuts(job.size) if shape in (None, (cut.copies, cut.parts, cut.stages))]
    worst, other_bits = np.zeros(3), []
    for cut in chosen:
        found, again = (trained(world, cut, arguments.steps) for _ in range(2))
        worst = np.maximum(worst, largest_errors(found, serial(arguments.steps)))
        if found[1:] != again[1:] or any(not np.array_equal(found[0][name], again[0][name]) for name in found[0]):
            other_bits.append(cut)
    says = ", ".join(
        f"{name} {error:.1e}" for name, error in zip(("parameters", "losses", "norms"), worst, strict=True)
    )
    job.print(f"{job.size} ranks on {world.node_count} nodes, {len(chosen)} cases of {arguments.steps} steps: {says}")
    job.print(f"other bits in a second training: {other_bits or 'none'}")
    return int(bool(other_bits) or (worst > LIMITS).any())


def trained(world, cut, steps: int):
    """(parameters by name, losses, norms)."""
    training = Training(world, cut)
    losses, norms = training.steps(steps)
    found = training.whole(), losses, norms
    training.close()
    return found


if __name__ == "__main__":
    raise SystemExit(main())
