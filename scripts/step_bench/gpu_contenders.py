"""Contenders of bench_step.py --backend cupy, each in a separate process (process.py).

    python scripts/bench_step.py --backend cupy --contender NAME '{"config": {...}, "batch_size": 64, ...}'

A step is a training step: forward, backward, clipping to norm 1, AdamW. All contenders start from the same parameters
and use the same batch in every step, so that their losses can be compared.
"""

from contextlib import contextmanager, nullcontext
from itertools import pairwise
from math import isinf
from time import perf_counter

import numpy as np

from gpt2.config import GPT2Config
from gpt2.parameters import Layout, Parameters, initialize
from scripts.step_bench.process import ContenderError, import_torch

LR = 3e-4
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
DEVICE = "cuda"  # for PyTorch


def first_parameters(config) -> Parameters:
    """Return GPT-2's initial parameters in host memory, the same for every contender."""
    parameters = Parameters.zeros(Layout(config))
    initialize(parameters, seed=1)
    return parameters


def first_batch(config, shape):
    """Return tokens and targets, (B, T) int32, the same for every contender."""
    size = (shape["batch_size"], shape["seq_len"] + 1)
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=size, dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def timed_steps(one_step, synchronize, facts):
    """Return a contender's function `steps`: run `count` steps, then wait for the GPU. one_step() returns the loss."""

    def steps(count):
        synchronize()
        start = perf_counter()
        for _ in range(count):
            loss = one_step()
        synchronize()
        return {"step_s": (perf_counter() - start) / count, "loss": float(loss)} | facts()

    return steps


def ours(shape, **options):
    """Make this project's contender. Besides `steps` it answers the requests `kernels`, `rates` and `gpu`.

    options: arguments of Device.
    """
    from gpt2.errors import UserError
    from gpt2.kernels import bind
    from gpt2.kernels import cupy as cupy_kernels
    from gpt2.model import new_model
    from gpt2.optimizer import AdamW, AdamWSettings
    from scripts.machine.gpu import copy_rate, dtype_of, gpu_facts, matmul_rates, on_gpu

    config = GPT2Config(**shape["config"])
    storage = shape["dtype"]
    try:
        device = cupy_kernels.Device(**options)
        kernels = bind(cupy_kernels, device)
        model = new_model(config, kernels, shape["batch_size"], shape["seq_len"], dtype_of(storage))
    except UserError as error:
        raise ContenderError(str(error)) from None
    model.parameters.flat[:] = on_gpu(device, first_parameters(config).flat, storage)
    layout = model.parameters.layout
    optimizer = AdamW(kernels, layout, 0, layout.size, AdamWSettings(weight_decay=WEIGHT_DECAY))
    step = OurStep(device, model, optimizer, first_batch(config, shape))
    pool = device.cupy.get_default_memory_pool()
    pool.free_all_blocks()  # the buffers used to copy the parameters are not part of a step's memory
    return {
        "steps": timed_steps(step, device.synchronize, lambda: {"memory_bytes": pool.total_bytes()}),
        "kernels": step.by_kernel,
        "rates": lambda copy_bytes, matmul_size, matmul_s: {
            "copy_bytes_per_s": copy_rate(device, copy_bytes),
            **matmul_rates(device, matmul_size, storage, matmul_s),
        },
        "gpu": lambda: {"parameters": layout.count, "facts": gpu_facts(device)},
    }


class OurStep:
    """One training step by this project's kernels; calling it returns the loss."""

    def __init__(self, device, model, optimizer, batch):
        self.device = device
        self.model = model
        self.optimizer = optimizer
        self.batch = batch

    def __call__(self):
        return self.run(nullcontext)

    def run(self, phase):
        """Run one step and return its loss. Each phase is queued inside phase(name), a context manager."""
        from gpt2.optimizer import clip_scale

        tokens, targets = self.batch
        model = self.model
        with phase("forward"):
            loss = model.forward(tokens, targets, 1.0 / tokens.size) / tokens.size
        with phase("backward"):
            model.backward(accumulate=False)
        with phase("update"):
            gradients = model.gradients.flat
            _, scale = clip_scale(model.kernels.sum_of_squares(gradients), MAX_NORM)
            self.optimizer.update(model.parameters.flat, gradients, LR, scale)
        return loss

    def by_kernel(self):
        """Run one step with events before and after each kernel; return the milliseconds of its phases and kernels.

        "rows": see KernelTimes. "choices": the measured times from which the device chose between our own kernels and
        cuBLASLt's epilogues or cuDNN's attention.
        """
        from scripts.step_bench.gpu_kernels import KernelTimes

        device = self.device
        times = KernelTimes(device)
        events = [("", device.new_event())]

        @contextmanager
        def phase(name):
            yield
            events.append((name, device.new_event()))
            events[-1][1].record(device.stream)

        device.synchronize()
        events[0][1].record(device.stream)
        with times.recording():
            self.run(phase)
        phases = {name: device.elapsed_ms(before, event) for (_, before), (name, event) in pairwise(events)}
        choices = [
            {"work": work, "shape": shape, "theirs_ms": None if isinf(theirs_ms) else theirs_ms, "ours_ms": ours_ms}
            for (work, shape, _), (theirs_ms, ours_ms) in device.faster_of.times_ms.items()
        ]
        return {"phases_ms": phases, "rows": times.rows, "choices": choices}


def pytorch(shape, compiled):
    """Make the contender PyTorch, as nanoGPT trains: float32 parameters, autocast to bfloat16, fused AdamW.

    PyTorch chooses the attention kernel. The vocabulary is padded like ours; pad rows are excluded from the softmax.
    """
    torch, torch_gpt2 = import_torch()

    config = GPT2Config(**shape["config"])
    bfloat16 = shape["dtype"] == "bfloat16"
    if bfloat16:
        torch.set_float32_matmul_precision("high")  # nanoGPT's allow_tf32
    start = first_parameters(config)
    p = {
        tensor.name: torch.from_numpy(start.view(tensor.name)).to(DEVICE).requires_grad_()
        for tensor in start.layout.tensors
    }
    optimizer = torch_gpt2.new_adamw(p, WEIGHT_DECAY, lr=LR, betas=(0.9, 0.95), fused=True)
    tokens, targets = (torch.from_numpy(part.astype(np.int64)).to(DEVICE) for part in first_batch(config, shape))
    pads = torch_gpt2.pads_of(config.vocab_size, len(p["wte"]), DEVICE)
    loss_function = torch.compile(torch_gpt2.loss_of) if compiled else torch_gpt2.loss_of

    def one_step():
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bfloat16):
            loss = loss_function(p, tokens, targets, config.n_layer, config.n_head, pads)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def facts():
        versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
        return {"memory_bytes": torch.cuda.max_memory_reserved(), "versions": versions}

    return {"steps": timed_steps(one_step, torch.cuda.synchronize, facts)}


MAKERS = {
    "ours": ours,
    "apart": lambda shape: ours(shape, epilogues="never"),
    "cudnn": lambda shape: ours(shape, attention="cudnn"),
    "torch": lambda shape: pytorch(shape, compiled=False),
    "torch-compiled": lambda shape: pytorch(shape, compiled=True),
}
