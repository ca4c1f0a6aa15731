"""Linear regression by gradient descent, its samples spread over the ranks: mpirun -n 4 python gradient_descent.py RUN

It trains no GPT-2. From gpt2-mpi it uses the placement of ranks on nodes, a tracer and an all-reduce.
"""

import sys

import numpy as np

from dist.host.allreduce import RingAllReduce
from dist.world import start_world
from scripts.own_program.traced import traced

STEPS, SAMPLES, FEATURES, RATE = 20, 64, 100_003, 5e-4


def main(out: str) -> None:
    world = start_world()
    random, truth = np.random.default_rng(world.rank), np.random.default_rng(99).normal(size=FEATURES)
    inputs = random.normal(size=(SAMPLES, FEATURES))
    targets, weights = inputs @ truth, np.zeros(FEATURES)
    allreduce = RingAllReduce(world)
    with traced(world, out, "gradient-descent") as tracer:
        for step in range(1, STEPS + 1):
            with tracer.step(step):
                with tracer.phase("compute"):
                    error = inputs @ weights - targets
                    gradient = inputs.T @ error / (SAMPLES * world.size)
                with tracer.phase("allreduce", bytes=gradient.nbytes):
                    allreduce(gradient)
                with tracer.phase("update"):
                    weights -= RATE * gradient
                tracer.note(loss=error @ error / SAMPLES)
    squares = world.comm.allreduce(np.array([targets @ targets, error @ error]))
    before, after = squares / (SAMPLES * world.size)
    world.print(f"mean square error {before:,.0f}, after {STEPS} steps {after:,.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
