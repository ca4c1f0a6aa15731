"""Contenders of bench_step.py on CPUs, each in a separate process (process.py).

    python scripts/bench_step.py --contender NAME '{"model": "gpt2-124M", "batch_size": 4, "seq_len": 64, "threads": 2}'

The answer to {"do": "step"} has step_s, parts (seconds by name), peak_memory_bytes, versions, environment (variables
that influence matrix products) and blas (scripts/machine/blas.py: this process's BLAS facts; None for PyTorch).
"""

import os
import resource
from collections import defaultdict
from importlib.metadata import version
from time import perf_counter
from types import SimpleNamespace

from scripts.machine.blas import blas_facts
from scripts.step_bench.process import import_torch

PREFIXES = ("OPENBLAS_", "OMP_", "MKL_", "KMP_", "GOMP_")  # of environment variables that BLAS and OpenMP read


def ours(shape):
    """Measure our forward, backward and AdamW, with the time of each kernel."""
    import numpy as np

    from gpt2.config import PRESETS
    from gpt2.kernels import load_kernels
    from gpt2.model import new_model
    from gpt2.optimizer import AdamW, AdamWSettings
    from gpt2.parameters import initialize

    spent = defaultdict(float)
    kernels = timed(load_kernels("numpy", shape["threads"], dtype=shape["dtype"]), spent)
    model = new_model(PRESETS[shape["model"]], kernels, shape["batch_size"], shape["seq_len"])
    initialize(model.parameters, seed=1)
    optimizer = AdamW(kernels, model.parameters.layout, 0, model.parameters.layout.size, AdamWSettings())
    random = np.random.default_rng(1)
    inputs, targets = random.integers(
        model.config.vocab_size, size=(2, shape["batch_size"], shape["seq_len"]), dtype=np.int32
    )

    def step():
        spent.clear()
        start = perf_counter()
        model.forward(inputs, targets, 1.0 / inputs.size)
        forward = perf_counter()
        model.backward(accumulate=False)
        backward = perf_counter()
        optimizer.update(model.parameters.flat, model.gradients.flat, 1e-4, 1.0)
        end = perf_counter()
        phases = {"forward": forward - start, "backward": backward - forward, "update": end - backward}
        return end - start, phases | {f"  {name}": spent[name] for name in sorted(spent, key=spent.get, reverse=True)}

    return step, {"numpy": version("numpy")}


def timed(kernels, spent) -> SimpleNamespace:
    """Wrap the kernels so that each call adds its seconds to spent[name]."""
    from gpt2.kernels import KERNELS

    def wrap(name, kernel):
        def call(*arguments):
            start = perf_counter()
            result = kernel(*arguments)
            spent[name] += perf_counter() - start
            return result

        return call

    return SimpleNamespace(**vars(kernels) | {name: wrap(name, getattr(kernels, name)) for name in KERNELS})


def floor(shape):
    """Measure all matrix products of the step, in its order, and nothing else."""
    import numpy as np
    from threadpoolctl import ThreadpoolController

    from gpt2.config import PRESETS
    from gpt2.kernels import load_kernels
    from scripts.step_bench.products import step_products

    cores = load_kernels("numpy", shape["threads"], dtype=shape["dtype"]).device
    blas = ThreadpoolController().select(user_api="blas").lib_controllers
    products = step_products(
        PRESETS[shape["model"]], shape["batch_size"], shape["seq_len"], cores.operand_dtype or np.float32
    )

    def step():
        parts = defaultdict(float)
        start = perf_counter()
        for part, multiply in products:
            before = perf_counter()
            for library in blas:
                library.set_num_threads(1 if "attention" in part or cores.operand_dtype else shape["threads"])
            multiply(cores)
            parts[part] += perf_counter() - before
        return perf_counter() - start, parts

    return step, {"numpy": version("numpy")}


def peak(shape):
    """Measure the multiply-add instruction's peak rate; answer with the seconds that a step's products take at it."""
    from gpt2.config import PRESETS
    from scripts.step_bench.peak import InstructionPeak
    from scripts.step_bench.products import least_flops

    measured = InstructionPeak(shape["dtype"])
    flops = least_flops(PRESETS[shape["model"]], shape["batch_size"], shape["seq_len"])

    def step():
        seconds = flops / measured.flops(shape["threads"])
        return seconds, {measured.instruction: seconds}

    return step, {"numba": version("numba")}


def pytorch(shape, compiled):
    """Measure PyTorch's forward, backward and fused AdamW, eager or compiled; bfloat16 by torch.autocast."""
    torch, torch_gpt2 = import_torch()
    from gpt2.config import PRESETS
    from gpt2.parameters import Layout

    torch.set_num_threads(shape["threads"])
    config = PRESETS[shape["model"]]
    p = {tensor.name: (0.02 * torch.randn(tensor.shape)).requires_grad_() for tensor in Layout(config).tensors}
    optimizer = torch_gpt2.new_adamw(p, 0.1, lr=1e-4, fused=True)
    inputs, targets = torch.randint(config.vocab_size, (2, shape["batch_size"], shape["seq_len"]))
    loss_function = torch.compile(torch_gpt2.loss_of) if compiled else torch_gpt2.loss_of
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=shape["dtype"] == "bfloat16")

    def step():
        start = perf_counter()
        with autocast:
            loss = loss_function(p, inputs, targets, config.n_layer, config.n_head)
        forward = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        backward = perf_counter()
        optimizer.step()
        end = perf_counter()
        return end - start, {"forward": forward - start, "backward": backward - forward, "update": end - backward}

    return step, {"torch": torch.__version__}


def answering(make):
    """Return a contender's maker. make(shape) returns a function that runs one step."""

    def make_functions(shape):
        one_step, versions = make(shape)
        facts = {
            "versions": versions,
            "environment": {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
            "blas": blas_facts(os.environ) if "numpy" in versions else None,
        }

        def step():
            seconds, parts = one_step()
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return {"step_s": seconds, "parts": parts, "peak_memory_bytes": peak_bytes} | facts

        return {"step": step}

    return make_functions


MAKERS = {
    "ours": answering(ours),
    "ours-float32": answering(lambda shape: ours(shape | {"dtype": "float32"})),
    "floor": answering(floor),
    "peak": answering(peak),
    "torch": answering(lambda shape: pytorch(shape, compiled=False)),
    "torch-compiled": answering(lambda shape: pytorch(shape, compiled=True)),
}
