"""What bench_step.py --backend cupy measures, each in a process of its own (process.py).

    python scripts/bench_step.py --backend cupy --contender NAME '{"config": {...}, "batch_size": 64, ...}'

A step is what training does: forward, backward, the gradients clipped to norm 1, AdamW. All start from the same
parameters and take the same batch every time, so that their losses can be told to be the same.
"""

from contextlib import contextmanager, nullcontext
from itertools import pairwise
from math import isinf
from time import perf_counter

import numpy as np

from gpt2.config import GPT2Config
from gpt2.parameters import Layout, Parameters, initialize
from scripts.step_bench.process import ContenderError, import_torch

LR, WEIGHT_DECAY, MAX_NORM = 3e-4, 0.1, 1.0
DEVICE = "cuda"  # of PyTorch


def first_parameters(config) -> Parameters:
    """GPT-2's initialization on the host, the same for everyone."""
    parameters = Parameters.zeros(Layout(config))
    initialize(parameters, seed=1)
    return parameters


def first_batch(config, shape):
    """tokens and targets (B, T) int32, the same for everyone."""
    size = (shape["batch_size"], shape["seq_len"] + 1)
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=size, dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def timed_steps(one_step, synchronize, facts):
    """A contender's `steps`: `count` of them, with one wait at the end; one_step() returns the loss."""

    def steps(count):
        synchronize()
        start = perf_counter()
        for _ in range(count):
            loss = one_step()
        synchronize()
        return {"step_s": (perf_counter() - start) / count, "loss": float(loss)} | facts()

    return steps


def ours(shape, **options):
    """This project's kernels. `options` are those of Device. It also answers `kernels`, `rates` and `gpu`."""
    from gpt2.errors import UserError
    from gpt2.kernels import bind
    from gpt2.kernels import cupy as cupy_kernels
    from gpt2.model import new_model
    from gpt2.optimizer import AdamW, AdamWSettings
    from scripts.machine.gpu import copy_rate, dtype_of, gpu_facts, matmul_rates, on_gpu

    config, storage = GPT2Config(**shape["config"]), shape["dtype"]
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
    pool.free_all_blocks()  # what brought the parameters here is no part of a step's memory
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
        self.device, self.model, self.optimizer, self.batch = device, model, optimizer, batch

    def __call__(self):
        return self.run(nullcontext)

    def run(self, phase):
        """One step, each phase of which is queued within phase(name), a context manager; returns the loss."""
        from gpt2.optimizer import clip_scale

        (tokens, targets), model = self.batch, self.model
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
        """Milliseconds of the phases and kernels of one step that is run for it, with events around each kernel.

        "rows" are those of KernelTimes. "choices" are the times by which the device took cuBLASLt's epilogues and
        cuDNN's attention, or kernels of ours.
        """
        from scripts.step_bench.gpu_kernels import KernelTimes

        device, times = self.device, KernelTimes(self.device)
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
    """PyTorch as nanoGPT trains: float32 parameters, bfloat16 by autocast, fused AdamW, its own choice of attention.

    The vocabulary is padded as ours is, and its pads count in no softmax, either.
    """
    torch, torch_gpt2 = import_torch()

    config, bfloat16 = GPT2Config(**shape["config"]), shape["dtype"] == "bfloat16"
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
