"""What may make a step on a GPU faster, beside what it does today: bench_step.py --backend cupy times both in turns.

Only the benchmark runs a candidate: one run on a GPU decides whether it takes the place of today's or goes. Both do the
same work on arrays of the step's shapes. Their results are compared first: a candidate that is wrong gets no time.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from gpt2.errors import UserError
from gpt2.kernels.cupy import attention, launch
from gpt2.kernels.cupy.cudnn_attention import CudnnAttention
from gpt2.kernels.cupy.launch import storage
from scripts.machine.gpu import on_host, random_on_gpu
from scripts.step_bench.process import ContenderError
from traces.record.stream_times import GPU_PHASES, StreamTimes

TOLERANCE = 2e-2  # of the largest value of each array, or of a step's time
COMPARED = 1 << 20  # values at each end of an array


@dataclass(frozen=True)
class Trial:
    """times_ms: of one turn of today's way, and of the candidate's. a_step: how many times a step does that.
    difference: of what both make, as a part of the largest value that today's has."""

    times_ms: tuple[Callable[[], float], Callable[[], float]]
    a_step: int
    difference: float


def measured(step, name: str, turns: int, **options) -> dict:
    """Medians over the turns, and today's time over the candidate's turn by turn. step: gpu_contenders.OurStep.

    ContenderError where the candidate is not for this step, lacks what it needs, or is wrong.
    """
    try:
        trial = CANDIDATES[name].new_trial(step, **options)
    except UserError as error:
        raise ContenderError(str(error)) from None
    if not trial.difference <= TOLERANCE:  # nor where it is no number
        raise ContenderError(f"it differs from today's by {trial.difference:.2g}, expected at most {TOLERANCE:g}")
    today_ms, candidate_ms = zip(*[[time_ms() for time_ms in trial.times_ms] for _ in range(turns)], strict=True)
    return {
        "a_step": trial.a_step,
        "today_ms": statistics.median(today_ms),
        "candidate_ms": statistics.median(candidate_ms),
        "today_over_candidate": statistics.median(a / b for a, b in zip(today_ms, candidate_ms, strict=True)),
        "difference": trial.difference,
    }


def attention_three_blocks(step) -> Trial:
    """Our attention's forward, of which three blocks fit into the registers of a multiprocessor."""
    config, parameters = step.model.config, step.model.parameters.flat
    if storage(parameters) != "bfloat16" or config.head_size != 64:
        raise ContenderError(f"heads of {config.head_size} in {storage(parameters)}, expected 64 in bfloat16")
    outputs = [new_attention_outputs(step) for _ in range(2)]
    arguments = random_on_gpu(step.device, *step.batch[0].shape, 3 * config.n_embd), config.n_head
    today = partial(attention.own_forward, step.device)
    return of_kernels(step, config.n_layer, today, partial(today, kernel="forward_three_blocks"), outputs, arguments)


def cudnn_any_order(step) -> Trial:
    """cuDNN's backward, whose sums may be added up in any order: other bits every time."""
    config, parameters, device = step.model.config, step.model.parameters.flat, step.device
    if storage(parameters) != "bfloat16":
        raise ContenderError(f"cuDNN's attention in {storage(parameters)}, expected bfloat16")
    today, candidate = CudnnAttention(device), CudnnAttention(device, is_deterministic=False)
    (B, T), (out, logsumexp) = step.batch[0].shape, new_attention_outputs(step)
    qkv, dout = (random_on_gpu(device, B, T, width) for width in (3 * config.n_embd, config.n_embd))
    today.forward(out, logsumexp, qkv, config.n_head)
    outputs = [[device.empty(qkv.shape, qkv.dtype)] for _ in range(2)]
    arguments = dout, qkv, out, logsumexp, config.n_head
    return of_kernels(step, config.n_layer, today.backward, candidate.backward, outputs, arguments)


def layernorm_kept(step) -> Trial:
    """LayerNorm's backward, which reads a row once and keeps it in registers."""
    config, device, N = step.model.config, step.device, step.batch[0].size
    C = config.n_embd
    inputs, doutputs = random_on_gpu(device, 2, N, C, storage=storage(step.model.parameters.flat))
    weight, normalized = inputs[0], device.empty((N, C), inputs.dtype)
    mean, rstd = (device.empty((N,), np.float32) for _ in range(2))
    launch.layernorm_forward(device, normalized, mean, rstd, inputs, weight, weight)
    outputs = [[device.empty(shape, inputs.dtype) for shape in ((N, C), (C,), (C,))] for _ in range(2)]
    arguments = doutputs, inputs, mean, rstd, weight, False
    today, candidate = (partial(f, device) for f in (launch.layernorm_backward, launch.layernorm_backward_kept))
    return of_kernels(step, 2 * config.n_layer + 1, today, candidate, outputs, arguments)


def anchors(step, anchor_every: int) -> Trial:
    """Whole steps, traced as training traces them, with an anchor for each step or for so many.

    The difference is that of the phases of steps that are traced in both ways at once, as a part of these steps.
    """
    both = [PhaseTimes(step.device, every) for every in (1, anchor_every)]

    def run(*traced) -> float:
        """Milliseconds of a step."""
        step.device.synchronize()
        start = perf_counter()
        for number in range(anchor_every):
            with together(times.step(number) for times in traced):
                step.run(lambda name: together(times.phase(name) for times in traced))
        return (perf_counter() - start) / anchor_every * 1e3

    run(*both)
    today, candidate = (times.ns for times in both)
    difference = max(abs(today[name] - candidate[name]) for name in today) / sum(today.values())
    return Trial(tuple(partial(run, times) for times in both), 1, difference)


@dataclass(frozen=True)
class Candidate:
    """text: as the table has it. new_trial(step, ...): what measured() times; UserError where it cannot be had."""

    text: str
    new_trial: Callable[..., Trial]


CANDIDATES = {
    "attention_three_blocks": Candidate("attention_forward, three blocks a multiprocessor", attention_three_blocks),
    "cudnn_any_order": Candidate("cudnn_backward, sums in any order", cudnn_any_order),
    "layernorm_kept": Candidate("layernorm_backward, row kept in registers", layernorm_kept),
    "anchors": Candidate("a traced step, clocks tied less often", anchors),
}


def new_attention_outputs(step) -> list:
    """out and logsumexp of the step's shape, in bfloat16 and float32."""
    config, (B, T) = step.model.config, step.batch[0].shape
    out = step.device.empty((B, T, config.n_embd), step.model.parameters.flat.dtype)
    return [out, step.device.empty((B, config.n_head, T), np.float32)]


def of_kernels(step, a_step: int, today, candidate, outputs, arguments) -> Trial:
    """today(*outputs[0], *arguments) beside candidate(*outputs[1], *arguments), by events on the stream."""
    device = step.device
    runs = [partial(kernel, *own, *arguments) for kernel, own in zip((today, candidate), outputs, strict=True)]
    for run in runs:
        run()
    difference = max(differ(device, *pair) for pair in zip(*outputs, strict=True))
    return Trial(tuple(partial(device.time_ms, run) for run in runs), a_step, difference)


def differ(device, today, candidate) -> float:
    """The largest difference over today's largest value, of those that are compared."""
    ends = slice(None, COMPARED), slice(-COMPARED, None)
    one, other = (
        np.concatenate([on_host(device, array.reshape(-1)[end]) for end in ends]) for array in (today, candidate)
    )
    return float(np.abs(one - other).max() / np.abs(one).max())


@contextmanager
def together(contexts):
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class PhaseTimes:
    """Nanoseconds of the phases of steps, by name, as a Tracer beside a GPU has them from StreamTimes."""

    def __init__(self, device, anchor_every: int):
        self._stream, self.ns = StreamTimes(device, GPU_PHASES, anchor_every), Counter()

    @contextmanager
    def step(self, number: int):
        self._stream.begin_step(number)
        yield
        self._stream.end_step(failed=False)

    @contextmanager
    def phase(self, name: str):
        begin = self._stream.begin(name)
        yield
        self._stream.end(name, begin, lambda begin_ns, end_ns: self.ns.update({name: end_ns - begin_ns}))
