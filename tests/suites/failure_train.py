"""scripts/train.py with a rank that fails in the middle of a step, for failure_suite.py.

    mpirun -n 3 python tests/suites/failure_train.py raise:1:25 --steps 40 --out runs/broken

raise:R:S    rank R raises an exception in step S
exit:R:S     rank R calls os._exit(3), as a library that gives up does
sleep:R:S    rank R sleeps and never comes back
nan:R:S      rank R's parameters are no numbers any more
overflow:R:S rank R's gradients are infinite
drift:R:S    one of rank R's parameters is another than on the other ranks
nan-gradients:R:S    rank R's gradients are no numbers, its loss is one
long-validation:R:S  from step S on rank R takes 8 s for a validation
slow:R:S     from step S on rank R takes 0.2 s longer for each

R may be `all`. The rank says on standard output when it does so: `fault at SECONDS`, as time.time() counts.
"""

import os
import sys
import time

import mpi4py

mpi4py.rc(initialize=False, finalize=True)  # as in train.py

from mpi4py import MPI

from scripts import train
from scripts.training.worker import Worker
from tests.suites.faults.log import MARK
from tests.suites.faults.suite import take_fault

FOR_EVER_S, BATCH_S, SLOW_S = 1e6, 0.4, 0.2


def main():
    fault, rank, step = take_fault(FAULTS, "FAULT:R:S")
    fail_in_step(FAULTS[fault], rank, int(step))
    train.main()


def fail_in_step(fail, rank: str, step: int) -> None:
    gradients = Worker.forward_backward

    def failing(worker, number, *arguments):
        if number == step and rank in ("all", str(MPI.COMM_WORLD.rank)):
            # Before the line break a launcher may hold the line back.
            sys.stdout.write(f"{MARK} {time.time()}\n")
            sys.stdout.flush()
            return fail(worker, lambda: gradients(worker, number, *arguments))
        return gradients(worker, number, *arguments)

    Worker.forward_backward = failing


def raise_error(worker: Worker, gradients) -> float:
    raise ValueError("token 70000 is not in the vocabulary")


def leave(worker: Worker, gradients) -> float:
    os._exit(3)


def sleep(worker: Worker, gradients) -> float:
    time.sleep(FOR_EVER_S)
    return gradients()


def lose_numbers(worker: Worker, gradients) -> float:
    worker.model.parameters.flat[:] = float("nan")
    return gradients()


def overflow(worker: Worker, gradients) -> float:
    loss = gradients()
    worker.model.gradients.flat[:] = float("inf")
    return loss


def drift(worker: Worker, gradients) -> float:
    worker.model.parameters.flat[0] += 1e-3
    return gradients()


def lose_gradients(worker: Worker, gradients) -> float:
    loss = gradients()
    worker.model.gradients.flat[:] = float("nan")
    return loss


def validate_long(worker: Worker, gradients) -> float:
    put_off(worker.model, "token_losses", BATCH_S)  # which is called for each of 20 batches
    return gradients()


def slow_down(worker: Worker, gradients) -> float:
    put_off(worker, "seconds", SLOW_S)  # which is called once a step
    return gradients()


def put_off(owner, name: str, seconds: float) -> None:
    """From here on a method of the owner sleeps first."""
    method = getattr(owner, name)

    def slow(*arguments):
        time.sleep(seconds)
        return method(*arguments)

    setattr(owner, name, slow)


FAULTS = {
    "raise": raise_error, "exit": leave, "sleep": sleep, "nan": lose_numbers, "overflow": overflow, "drift": drift,
    "nan-gradients": lose_gradients, "long-validation": validate_long, "slow": slow_down,
}  # fmt: skip

if __name__ == "__main__":
    main()
