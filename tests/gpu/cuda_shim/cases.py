"""What each kernel is to give, by the NumPy kernels in float64 on the very values that the CUDA kernel reads.

A case runs its kernels on a device, the CPU shim or a GPU, and returns [(name, what came out, what is expected)], with
a factor for the tolerance behind it where rounding is amplified.
"""

from functools import partial
from itertools import pairwise

import numpy as np

from gpt2.kernels import numpy as numpy_kernels
from gpt2.kernels.cupy import attention, classifier, launch
from gpt2.kernels.numpy.cores import Cores
from tests.gpu.cuda_shim.memory import Memory, widen

# Of a value plus its array's root mean square. bfloat16: two roundings, each of half a unit in the last of 8 places.
TOLERANCES = {"float32": 4e-6, "bfloat16": 2**-8}
# Attention's probabilities and their gradients are rounded on the way, too; at random, by twice as much as to nearest.
FACTORS = {
    "attention_forward_case": 8, "attention_rows_case": 8, "attention_backward_case": 8,
    "adamw_rounding_case": 2, "round_parameters_case": 2,
}  # fmt: skip
SCALE = 0.25  # of the losses' gradients
# The last two: accumulated; with column sums.
LAYERNORM_BACKWARD_SIZES = [(1, 33, False, True), (37, 40, True, True), (13, 1000, True, False), (700, 1, False, True)]
ATTENTION_SIZES = [(1, 5, 1, 64), (2, 133, 2, 64), (1, 200, 1, 128)]
# Sizes that are no multiples of warps, blocks or 16 bytes, and some that are of the last: 40, 264 and 1000 channels.
CASES = [
    ("embedding_case", "embedding", [(2, 9, 33, False), (3, 5, 40, True), (1, 37, 264, False), (2, 3, 1, True)]),
    ("embedding_part_case", "embedding", [(2, 9, 33, 3, False), (3, 5, 40, 2, True), (1, 4, 264, 11, True)]),
    ("add_case", "add", [(3, 33, "new"), (7, 40, "in place"), (7, 40, "with a bias"), (3, 33, "with a bias")]),
    ("layernorm_forward_case", "layernorm", [(1, 33, True), (11, 40, True), (3, 1000, False), (9, 7, False)]),
    ("layernorm_backward_case", "layernorm", LAYERNORM_BACKWARD_SIZES),
    ("gelu_case", "gelu", [(3, 33), (7, 40), (1, 5), (5, 1032)]),
    ("classifier_case", "classifier", [(3, 50, 56, 1), (2, 5003, 5008, 3), (2, 1003, 1005, 1), (3, 777, 784, 60)]),
    ("classifier_part_case", "classifier", [(3, 50, 56, 1, 3), (2, 5003, 5008, 3, 2), (3, 9, 24, 60, 3)]),
    ("column_sums_case", "column_sums", [(3, 33, False), (1100, 40, True), (5, 1032, True)]),
    ("attention_forward_case", "attention", ATTENTION_SIZES),
    ("attention_rows_case", "attention", [(1, 133, 2, 64, 130), (2, 200, 1, 128, 63)]),
    ("attention_backward_case", "attention_backward", ATTENTION_SIZES),
    ("adamw_case", "adamw", [(1003, 0), (1024, 0), (517, 1), (7, 3)]),
    ("adamw_rounding_case", "adamw", [(1003, 0, "random"), (517, 1, "nearest"), (517, 3, "random")]),
    ("round_parameters_case", "adamw", [(1003, 0, "random"), (517, 1, "nearest")]),
    ("sum_of_squares_case", "sum_of_squares", [(5003, 0), (4096, 0), (777, 1), (700_003, 0)]),
]


def run(device, cores: Cores, name, storage, sizes):
    """The case's outputs, after they have been compared with what is expected."""
    memory = Memory(storage)
    results = globals()[name](device, memory, cores, *sizes)
    for what, got, expected, *factor in results:
        _assert_close(what, got, expected, FACTORS.get(name, 1) * max([1, *factor]))
    memory.assert_margins_kept()
    return [got for _, got, *_ in results]


def _assert_close(what, got, expected, factor):
    tolerance = factor * TOLERANCES["bfloat16" if got.dtype == np.uint16 else "float32"]
    root_mean_square = np.sqrt(np.mean(np.square(np.minimum(np.abs(expected), 10))))  # not of a few values far out
    np.testing.assert_allclose(widen(got), expected, tolerance, tolerance * root_mean_square, err_msg=what)


def embedding_case(device, memory, cores: Cores, B, T, C, accumulate):
    """V small, so that tokens repeat; one token often enough that every thread row of a block has some of it."""
    V, context = 11, T + 2
    tokens = memory.random.integers(V, size=(B, T)).astype(np.int32)
    tokens[:, ::2] = 3
    wte, wpe, dout, out = memory.normal(V, C), memory.normal(context, C), memory.normal(B, T, C), memory.nans(B, T, C)
    launch.embedding_forward(device, out, tokens, wte, wpe)
    expected_out = np.empty((B, T, C))
    numpy_kernels.embedding_forward(cores, expected_out, tokens, widen(wte), widen(wpe))
    dwte, dwpe = memory.normal(V, C), memory.normal(context, C) if accumulate else memory.nans(context, C)
    expected_dwte, expected_dwpe = widen(dwte), widen(dwpe)
    numpy_kernels.embedding_backward(cores, expected_dwte, expected_dwpe, widen(dout), tokens, accumulate)
    launch.embedding_backward(device, dwte, dwpe, dout, tokens, accumulate)
    return [("out", out, expected_out), ("dwte", dwte, expected_dwte), ("dwpe", dwpe, expected_dwpe)]


def embedding_part_case(device, memory, cores: Cores, B, T, C, parts, accumulate):
    """Parts of the vocabulary one after the other: their sums are the whole, and their rows of dwte lie side by side.
    With as many parts as rows there are some whose tokens nobody has."""
    V, context = 11, T + 2
    tokens = memory.random.integers(V, size=(B, T)).astype(np.int32)
    tokens[:, ::2] = 3
    wte, wpe, dout = widen(memory.normal(V, C)), memory.normal(context, C), memory.normal(B, T, C)
    dwte, dwpe = widen(memory.normal(V, C)), memory.normal(context, C) if accumulate else memory.nans(context, C)
    expected_out, expected_dwte, expected_dwpe, results = np.empty((B, T, C)), dwte.copy(), widen(dwpe), []
    numpy_kernels.embedding_backward(cores, expected_dwte, expected_dwpe, widen(dout), tokens, accumulate)
    for part in range(parts):
        start, stop = V * part // parts, V * (part + 1) // parts
        own_wte, own_dwte, out = memory.put(wte[start:stop]), memory.put(dwte[start:stop]), memory.nans(B, T, C)
        own_wpe, own_dwpe = (wpe, dwpe) if part == 0 else (None, None)
        launch.embedding_forward(device, out, tokens, own_wte, own_wpe, start)
        launch.embedding_backward(device, own_dwte, own_dwpe, dout, tokens, accumulate, start)
        widened = None if own_wpe is None else widen(own_wpe)
        numpy_kernels.embedding_forward(cores, expected_out, tokens, widen(own_wte), widened, start)
        results += [(f"out {part}", out, expected_out.copy()), (f"dwte {part}", own_dwte, expected_dwte[start:stop])]
    return [*results, ("dwpe", dwpe, expected_dwpe)]


def add_case(device, memory, cores: Cores, N, C, kind):
    first, second = memory.normal(N, C), memory.normal(N, C)
    bias = memory.normal(C) if kind == "with a bias" else None
    out = first if kind == "in place" else memory.nans(N, C)
    expected = widen(first) + widen(second) + (0.0 if bias is None else widen(bias))
    launch.add(device, out, first, second, bias)
    return [("out", out, expected)]


def layernorm_forward_case(device, memory, cores: Cores, N, C, with_residual):
    """What is normalized is the residual as stored, rounded."""
    inputs, branch, *small = (memory.normal(*shape) for shape in ((N, C), (N, C), (C,), (C,), (C,)))
    branch_bias, weight, bias = small
    residual, out, mean, rstd = (
        memory.nans(N, C), memory.nans(N, C), memory.nans(N, dtype=np.float32), memory.nans(N, dtype=np.float32),
    )  # fmt: skip
    results = []
    if with_residual:
        launch.residual_layernorm_forward(device, residual, out, mean, rstd, inputs, branch, *small)
        results.append(("residual", residual, widen(inputs) + widen(branch) + widen(branch_bias)))
    else:
        residual = inputs
        launch.layernorm_forward(device, out, mean, rstd, inputs, weight, bias)
    expected = np.empty((N, C)), np.empty(N), np.empty(N)
    numpy_kernels.layernorm_forward(cores, *expected, widen(residual), widen(weight), widen(bias))
    return results + list(zip(("out", "mean", "rstd"), (out, mean, rstd), expected, strict=True))


def layernorm_backward_case(device, memory, cores: Cores, N, C, accumulate, with_column_sums):
    """dinputs holds something before; so do dweight and dbias, if accumulate, and the column sums, which are written.

    What rounding leaves of dy * weight - its mean is multiplied by rstd: by 316 where a row has one channel.
    """
    inputs, doutputs, weight, dinputs = (memory.normal(*shape) for shape in ((N, C), (N, C), (C,), (N, C)))
    mean = memory.put_exactly(widen(inputs).mean(1).astype(np.float32))
    rstd = memory.put_exactly((1 / np.sqrt(widen(inputs).var(1) + 1e-5)).astype(np.float32))
    dweight, dbias = (memory.normal(C) if accumulate else memory.nans(C) for _ in range(2))
    got = dinputs, dweight, dbias, memory.normal(C) if with_column_sums else None
    expected = [None if array is None else widen(array) for array in got]
    arguments = doutputs, inputs, mean, rstd, weight
    numpy_kernels.layernorm_backward(cores, *expected, *map(widen, arguments), accumulate)
    launch.layernorm_backward(device, *got, *arguments, accumulate)
    names, factors = ("dinputs", "dweight", "dbias", "column_sums"), (rstd.max(), 1, 1, rstd.max())
    results = list(zip(names, got, expected, factors, strict=True))
    return results if with_column_sums else results[:-1]


def gelu_case(device, memory, cores: Cores, N, width):
    """With values far out on both sides, where the exponential overflows."""
    product, bias, doutputs = memory.normal(N, width), memory.normal(width), memory.normal(N, width)
    product[0, : min(width, 5)] = memory.put([-1e4, -90.0, 20.0, 90.0, 1e4][:width])
    saved, out, dinputs = memory.put(widen(product)), memory.nans(N, width), memory.put(widen(doutputs))
    launch.bias_gelu_forward(device, out, saved, bias)
    launch.gelu_backward(device, dinputs, saved)
    expected_out, slope = np.empty((N, width)), np.empty((N, width))
    numpy_kernels.linear_gelu_forward(cores, expected_out, slope, widen(saved), np.eye(width), np.zeros(width))
    expected_saved = widen(product) + widen(bias)
    return [("saved", saved, expected_saved), ("out", out, expected_out), ("d", dinputs, widen(doutputs) * slope)]


def classifier_case(device, memory, cores: Cores, N, V, padded, spread):
    logits, targets, expected_losses, dlogits = _logits(memory, cores, N, V, padded, spread)
    losses, losses_alone = (memory.nans(N, dtype=np.float32) for _ in range(2))
    classifier.cross_entropy(device, losses_alone, logits, targets, V, SCALE, False)
    classifier.cross_entropy(device, losses, logits, targets, V, SCALE, True)
    return [("losses", losses, expected_losses), ("alone", losses_alone, expected_losses), ("d", logits, dlogits)]


def classifier_part_case(device, memory, cores: Cores, N, V, padded, spread, parts):
    """Parts of the vocabulary one after the other, their maxima and sums put together here. Some have pads alone."""
    logits, targets, expected_losses, dlogits = _logits(memory, cores, N, V, padded, spread)
    starts = [padded * part // parts for part in range(parts + 1)]
    own = []
    for start, stop in pairwise(starts):
        statistics = [memory.nans(N, dtype=np.float32) for _ in range(3)]
        part = memory.put(widen(logits)[:, start:stop]), memory.put_exactly(targets - np.int32(start))
        known = min(max(0, V - start), stop - start)
        classifier.row_statistics(device, *statistics, *part, known)
        own.append((*part, known, *statistics))
    *_, all_maxima, all_sums, all_target_logits = zip(*own, strict=True)
    maxima = memory.put_exactly(np.max(all_maxima, axis=0))
    for own_maxima, sums in zip(all_maxima, all_sums, strict=True):
        classifier.launch_numbers(device, "rescale_sums", memory.storage, (sums, own_maxima, maxima))
    sums, target_logits = (memory.put_exactly(np.sum(rows, axis=0)) for rows in (all_sums, all_target_logits))
    losses = memory.nans(N, dtype=np.float32)
    classifier.launch_numbers(device, "losses_over_shards", memory.storage, (losses, maxima, sums, target_logits))
    results = [("losses", losses, expected_losses)]
    for (part, part_targets, known, *_), start in zip(own, starts, strict=False):
        classifier.gradient_of_shard(device, part, part_targets, maxima, sums, known, SCALE)
        results.append((f"d from {start}", part, dlogits[:, start : start + part.shape[1]]))
    return results


def _logits(memory, cores: Cores, N, V, padded, spread):
    """(logits, targets, losses and dlogits that are expected). The pad columns hold the largest logits and NaNs.
    spread: the logits' standard deviation."""
    values = spread * memory.random.standard_normal((N, padded))
    values[:, V:], values[:, V + 1 :] = 1e3, np.nan
    logits = memory.put(values)
    targets = memory.put_exactly(memory.random.integers(V, size=N).astype(np.int32))
    targets[-1] = V - 1
    losses, exponentials, row_scale = np.empty(N), np.empty((N, padded)), np.empty(N)
    numpy_kernels.classifier_forward(
        cores, losses, exponentials, row_scale, widen(logits)[:, :V], np.eye(padded, V), targets, V, SCALE
    )
    return logits, targets, losses, exponentials * row_scale[:, None]


def column_sums_case(device, memory, cores: Cores, N, width, accumulate):
    rows, sums = memory.normal(N, width), memory.normal(width) if accumulate else memory.nans(width)
    expected = widen(rows).sum(0) + (widen(sums) if accumulate else 0.0)
    launch.column_sums(device, sums, rows, accumulate)
    return [("sums", sums, expected)]


def attention_forward_case(device, memory, cores: Cores, B, T, H, head_size, forward=attention.attention_forward):
    qkv = _queries_keys_values(memory, B, T, H * head_size)
    out, logsumexp = memory.nans(B, T, H * head_size), memory.nans(B, H, T, dtype=np.float32)
    forward(device, out, logsumexp, qkv, H)
    expected = np.empty(out.shape), np.empty(logsumexp.shape)
    numpy_kernels.attention_forward(cores, *expected, widen(qkv), H)
    return [("out", out, expected[0]), ("logsumexp", logsumexp, expected[1])]


def attention_rows_case(device, memory, cores: Cores, B, T, H, head_size, first):
    """The newest rows of a text alone."""
    forward = partial(attention.attention_forward, first=first)
    (_, out, all_rows), (_, logsumexp, of_all_rows) = attention_forward_case(
        device, memory, cores, B, T, H, head_size, forward
    )
    rows = slice(first, T)
    return [("out", out[:, rows], all_rows[:, rows]), ("lse", logsumexp[:, :, rows], of_all_rows[:, :, rows])]


def attention_backward_case(device, memory, cores: Cores, B, T, H, head_size):
    C = H * head_size
    qkv, dout, dqkv = _queries_keys_values(memory, B, T, C), memory.normal(B, T, C), memory.nans(B, T, 3 * C)
    kept = np.empty((B, T, C)), np.empty((B, H, T))
    numpy_kernels.attention_forward(cores, *kept, widen(qkv), H)
    out, logsumexp = memory.put(kept[0]), memory.put_exactly(kept[1].astype(np.float32))
    attention.attention_backward(device, dqkv, dout, qkv, out, logsumexp, H)
    expected = np.empty(dqkv.shape)
    numpy_kernels.attention_backward(cores, expected, *map(widen, (dout, qkv, out, logsumexp)), H)
    return list(zip(("dq", "dk", "dv"), np.split(dqkv, 3, axis=2), np.split(expected, 3, axis=2), strict=True))


def _queries_keys_values(memory, B, T, C):
    """Some scores are large, so that the running maximum has to move; in bfloat16 out is as large as the values are."""
    qkv = memory.normal(B, T, 3 * C)
    qkv[:, :, : C // 2] = memory.put(3 * widen(qkv[:, :, : C // 2]))
    return qkv


def adamw_case(device, memory, cores: Cores, count, offset, rounding=None):
    """Three steps on a range that starts `offset` elements past a multiple of 16 bytes."""
    values, zeros = memory.random.standard_normal(count).astype(np.float32), np.zeros(count, np.float32)
    updated, m, v = (memory.put_exactly(array, offset) for array in (values, zeros, zeros))
    rounded = memory.put_exactly(np.full(count, 0xFFFF, np.uint16), offset)
    parameters, master = (updated, None) if rounding is None else (rounded, updated)
    ranges = [(0, count // 7), (count // 7 + 1, count // 5), (count // 3, count)]
    expected, expected_m, expected_v = widen(updated), np.zeros(count), np.zeros(count)
    for step in range(1, 4):
        gradients = memory.put(memory.random.standard_normal(count), offset)
        settings = (step, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.3)
        seed = 5 if rounding == "random" else None
        launch.adamw(device, parameters, gradients, m, v, ranges, *settings, master, 1 << 33, seed)
        numpy_kernels.adamw(cores, expected, widen(gradients), expected_m, expected_v, ranges, *settings)
    results = [("updated", updated, expected), ("m", m, expected_m), ("v", v, expected_v)]
    return results if rounding is None else [*results, ("parameters", parameters, expected)]


def adamw_rounding_case(device, memory, cores: Cores, count, offset, rounding):
    """The same of bfloat16 parameters with a float32 master copy, rounded to "nearest" or at "random"."""
    return adamw_case(device, memory, cores, count, offset, rounding)


def round_parameters_case(device, memory, cores: Cores, count, offset, rounding):
    """float32 values alone, for parameters that another rank has updated."""
    values = memory.put_exactly(memory.random.standard_normal(count).astype(np.float32), offset)
    rounded = memory.put_exactly(np.full(count, 0xFFFF, np.uint16), offset)
    launch.round_parameters(device, rounded, values, 5 if rounding == "random" else None, 1 << 33)
    return [("rounded", rounded, widen(values))]


def sum_of_squares_case(device, memory, cores: Cores, count, offset):
    """A flat range that starts `offset` elements past a multiple of 16 bytes."""
    flat = memory.put(memory.random.standard_normal(count), offset)
    got = np.array([launch.sum_of_squares(device, flat)])
    return [("total", got, np.array([numpy_kernels.sum_of_squares(cores, widen(flat))]))]
