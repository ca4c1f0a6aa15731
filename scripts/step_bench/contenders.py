"""Contenders of bench_step.py, each in a separate process (process.py).

    python scripts/bench_step.py --contender NAME '{"backend": "numpy", "config": {...}, "batch_size": 4, ...}'

A step is a training step: forward, backward, clipping to norm 1, AdamW. All contenders start from the same parameters
and use the same batch in every step, so that their losses can be compared.
"""

import resource
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace

import numpy as np

from gpt2.config import GPT2Config
from gpt2.kernels import KERNELS, load_kernels
from gpt2.model import new_model
from gpt2.optimizer import AdamW, AdamWSettings, clip_scale
from gpt2.parameters import Layout, Parameters, initialize
from scripts.machine.gpu import dtype_of, gpu_facts, on_gpu

SEED = 1
LR = 3e-4
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed_steps(
    one_step: Callable, synchronize=lambda: None, memory_bytes=resident_bytes, parts: dict | None = None, **facts
) -> Callable[[int], dict]:
    """Return a contender's function: run `count` steps, then wait for the GPU.

    one_step() returns the loss or None. parts: seconds by name, to which one_step adds. The answer has step_s, loss,
    memory_bytes, parts (of one step), versions and `facts`.
    """
    parts = {} if parts is None else parts

    def steps(count):
        parts.clear()
        synchronize()
        start = perf_counter()
        for _ in range(count):
            loss = one_step()
        synchronize()
        step_s = (perf_counter() - start) / count
        return {
            "step_s": step_s,
            "loss": None if loss is None else float(loss),
            "memory_bytes": memory_bytes(),
            "parts": {name: seconds / count for name, seconds in parts.items()},
            "versions": {},
        } | facts

    return steps


def first_parameters(config) -> Parameters:
    """Return GPT-2's initial parameters in host memory, the same for every contender."""
    parameters = Parameters.zeros(Layout(config))
    initialize(parameters, SEED)
    return parameters


def first_batch(config, shape):
    """Return tokens and targets, (B, T) int32, the same for every contender."""
    size = (shape["batch_size"], shape["seq_len"] + 1)
    tokens = np.random.default_rng(SEED).integers(config.vocab_size, size=size, dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def ours(shape):
    """Make this project's contender. Its parts are the kernels on CPUs."""
    config = GPT2Config(**shape["config"])
    kernels = load_kernels(shape["backend"], shape["threads"], dtype=shape["dtype"])
    if shape["backend"] == "cupy":
        return ours_on_gpu(shape, config, kernels)
    spent = defaultdict(float)
    model = new_model(config, timed(kernels, spent), shape["batch_size"], shape["seq_len"])
    initialize(model.parameters, SEED)
    return timed_steps(our_step(model, first_batch(config, shape)), parts=spent)


def ours_on_gpu(shape, config, kernels):
    device = kernels.device
    model = new_model(config, kernels, shape["batch_size"], shape["seq_len"], dtype_of(shape["dtype"]))
    model.parameters.flat[:] = on_gpu(device, first_parameters(config).flat, shape["dtype"])
    pool = device.cupy.get_default_memory_pool()
    pool.free_all_blocks()  # the buffers used to copy the parameters are not part of a step's memory
    step = our_step(model, first_batch(config, shape))
    return timed_steps(step, device.synchronize, pool.total_bytes, machine=gpu_facts(device))


def our_step(model, batch):
    """Return a function that trains one step and returns the loss."""
    tokens, targets = batch
    flat = model.parameters.flat
    layout = model.parameters.layout
    optimizer = AdamW(model.kernels, layout, 0, layout.size, AdamWSettings(weight_decay=WEIGHT_DECAY))

    def step():
        loss = model.forward(tokens, targets, 1.0 / tokens.size) / tokens.size
        model.backward(accumulate=False)
        gradients = model.gradients.flat
        _, scale = clip_scale(model.kernels.sum_of_squares(gradients), MAX_NORM)
        optimizer.update(flat, gradients, LR, scale)
        return loss

    return step


def timed(kernels, spent) -> SimpleNamespace:
    """Wrap the kernels so that each call adds its seconds to spent[name]."""

    def wrap(name, kernel):
        def call(*arguments):
            start = perf_counter()
            result = kernel(*arguments)
            spent[name] += perf_counter() - start
            return result

        return call

    return SimpleNamespace(**vars(kernels) | {name: wrap(name, getattr(kernels, name)) for name in KERNELS})


def floor(shape):
    """Make all matrix products of the step, in its order, and nothing else."""
    from threadpoolctl import ThreadpoolController

    from scripts.step_bench.products import step_products

    cores = load_kernels("numpy", shape["threads"], dtype=shape["dtype"]).device
    blas = ThreadpoolController().select(user_api="blas").lib_controllers
    products = step_products(
        GPT2Config(**shape["config"]), shape["batch_size"], shape["seq_len"], cores.operand_dtype or np.float32
    )
    parts = defaultdict(float)

    def step():
        for part, multiply in products:
            start = perf_counter()
            for library in blas:
                library.set_num_threads(1 if "attention" in part or cores.operand_dtype else shape["threads"])
            multiply(cores)
            parts[part] += perf_counter() - start

    return timed_steps(step, parts=parts)


def peak(shape):
    """Measure the peak rate of the multiply-add instruction, however many steps are asked for."""
    from scripts.step_bench.peak import InstructionPeak

    measured = InstructionPeak(shape["dtype"])
    return lambda count: {"flops": measured.flops(shape["threads"])}


def pytorch(shape, compiled):
    """Make the contender PyTorch, as nanoGPT trains: float32 parameters, autocast to bfloat16, fused AdamW.

    PyTorch chooses the attention kernel. The vocabulary is padded like ours; pad rows are excluded from the softmax.
    """
    import torch

    from scripts.step_bench import torch_gpt2

    config = GPT2Config(**shape["config"])
    place = "cuda" if shape["backend"] == "cupy" else "cpu"
    bfloat16 = shape["dtype"] == "bfloat16"
    torch.set_num_threads(shape["threads"])
    if place == "cuda" and bfloat16:
        torch.set_float32_matmul_precision("high")  # nanoGPT's allow_tf32
    start = first_parameters(config)
    p = {
        tensor.name: torch.from_numpy(start.view(tensor.name)).to(place).requires_grad_()
        for tensor in start.layout.tensors
    }
    optimizer = torch_gpt2.new_adamw(p, WEIGHT_DECAY, lr=LR, betas=(0.9, 0.95), fused=True)
    tokens, targets = (torch.from_numpy(part.astype(np.int64)).to(place) for part in first_batch(config, shape))
    pads = torch_gpt2.pads_of(config.vocab_size, len(p["wte"]), place)
    loss_function = torch.compile(torch_gpt2.loss_of) if compiled else torch_gpt2.loss_of

    def one_step():
        with torch.autocast(place, torch.bfloat16, enabled=bfloat16):
            loss = loss_function(p, tokens, targets, config.n_layer, config.n_head, pads)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    on_gpu = (torch.cuda.synchronize, torch.cuda.max_memory_reserved) if place == "cuda" else ()
    return timed_steps(one_step, *on_gpu, versions={"torch": torch.__version__})


MAKERS = {
    "ours": ours,
    "ours-float32": lambda shape: ours(shape | {"dtype": "float32"}),
    "floor": floor,
    "peak": peak,
    "torch": lambda shape: pytorch(shape, compiled=False),
    "torch-compiled": lambda shape: pytorch(shape, compiled=True),
}
