"""Which of OpenBLAS's kernels multiply fastest here: each is tried in a process of its own, and they take turns.

A process has one BLAS with one set of kernels from its start on, and one whose instructions the CPU lacks, or whose
kernels are broken, dies of it. So does a child here. The children load NumPy side by side; then each makes the products
of a linear layer, forward and backward, on one thread as training does, in ROUNDS rounds of which the best counts.
Products that differ from plain sums count for nothing.
"""

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHILD = f"from {__name__} import serve; serve()"
ROUNDS = 3
LIMIT_S = 20.0  # for one answer: NumPy may come from a slow disk
ROWS, INPUTS, OUTPUTS = 256, 768, 768  # of the linear layer that is timed: those of GPT-2 124M
ODD = 37, 65, 83  # and of one that fills no tile of a kernel
LOOKED_AT = 8  # rows of a large product that are compared
TOLERANCE = 1e-3  # sums of as many random numbers are about 30, and float32 rounds them in the sixth digit
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")


def try_all(environments: dict[str, dict], rounds: int = ROUNDS) -> dict[str, dict]:
    """For each of the environments by name {"library", "version", "kernels", "flops"}: operations a second.

    One is left out whose process dies, does not answer or multiplies wrongly, or has the kernels of one before it with
    the same block sizes.
    """
    children = {name: Child(environment) for name, environment in environments.items()}
    try:
        found = {name: answer for name, child in children.items() if (answer := child.answer()) and answer.pop("right")}
        for name in _doubles(found, environments):
            del found[name]
        for _ in range(rounds):
            for name in list(found):
                if answer := children[name].ask():
                    found[name]["flops"] = max(found[name].get("flops", 0.0), answer["flops"])
                else:
                    del found[name]
    finally:
        for child in children.values():
            child.end()
    return found


def _doubles(found: dict[str, dict], environments: dict[str, dict]) -> list[str]:
    """Those that would be tried twice: this OpenBLAS takes the same kernels for several names."""
    seen, doubles = set(), []
    for name, answer in found.items():
        key = answer["library"], answer["kernels"], environments[name].get("OPENBLAS_L2_SIZE")
        if key in seen:
            doubles.append(name)
        seen.add(key)
    return doubles


class Child:
    """A process that has loaded NumPy in an environment, and multiplies when it is asked."""

    def __init__(self, environment: dict):
        # Installed or not, this project is found there; -P: and no file of the folder that this was started in.
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD],
            env=environment | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self) -> dict | None:
        """One round's {"flops"}; None if the process is not there any more."""
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict | None:
        if not select.select([self.process.stdout], [], [], LIMIT_S)[0]:
            return None
        try:
            return json.loads(self.process.stdout.readline())
        except ValueError:  # it ended
            return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


def serve() -> None:
    """The child: says what it has loaded and whether it multiplies rightly, then the rate of each round.

    It ends when nobody asks any more.
    """
    import numpy as np

    from scripts.machine.blas import loaded_blas

    random, layer = np.random.default_rng(1), (ROWS, INPUTS, OUTPUTS)
    right = all(is_right(*product) for shape in (ODD, layer) for product in products(random, *shape))
    print(json.dumps(loaded_blas() | {"right": right}), flush=True)
    timed = products(random, *layer)
    while sys.stdin.readline():
        begun = time.perf_counter()
        for left, other in timed:
            left @ other
        flops = 2 * len(timed) * ROWS * INPUTS * OUTPUTS / (time.perf_counter() - begun)
        print(json.dumps({"flops": flops}), flush=True)


def products(random, rows: int, inputs: int, outputs: int) -> list:
    """The factors of a linear layer's three products: its forward, its inputs' gradient, its weights' gradient."""
    x, weight, dy = (
        random.standard_normal(shape, "float32") for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    return [(x, weight.T), (dy, weight), (dy.T, x)]


def is_right(left, other) -> bool:
    """Whether BLAS multiplies as plain sums in float64 do, in some rows, the first and the last among them."""
    import numpy as np

    looked_at = np.linspace(0, len(left) - 1, LOOKED_AT).astype(int)
    plain = np.einsum("ij,jk->ik", left[looked_at].astype(float), other.astype(float))
    return bool(np.abs((left @ other)[looked_at] - plain).max() < TOLERANCE)
