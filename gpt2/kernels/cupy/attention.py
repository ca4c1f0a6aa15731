"""Causal self-attention on the device: attention.cu and attention_backward.cu, or cuDNN's if it is faster."""

import math
from functools import partial

import numpy as np

from gpt2.errors import UserError
from gpt2.kernels.cupy.launch import ACCESS_BYTES, THREADS, int32, storage

HEAD_SIZES = (64, 128)
# By storage and head size, as in attention.cuh: the rows that a block keeps, and the rows in each tile of keys, or of
# queries, that it reads.
ROWS = {("float32", 64): 64, ("float32", 128): 64, ("bfloat16", 64): 128, ("bfloat16", 128): 64}
KEYS = {("float32", 64): 32, ("float32", 128): 32, ("bfloat16", 64): 64, ("bfloat16", 128): 64}
QUERIES = KEYS | {("bfloat16", 64): 32}
BLOCK = (128,)


def attention_forward(device, out, logsumexp, qkv, head_count, first=None):
    """Compute out (B, T, C) and logsumexp (B, H, T) float32, for backward, from qkv (B, T, 3C): queries, keys, values.

    With `first`, our own kernel runs: a growing text has a new T for each token, and cuDNN takes seconds per shape.
    """
    arguments = out, logsumexp, qkv, head_count
    ours = partial(
        _launch, device, "attention", "forward", 1, KEYS, (out, logsumexp, qkv), out.shape, head_count, first or 0
    )
    if device.cudnn_attention is None or first is not None:
        return ours()
    return device.faster_of("attention", out, partial(device.cudnn_attention.forward, *arguments), ours)


def attention_backward(device, dqkv, dout, qkv, out, logsumexp, head_count):
    """Compute dqkv (B, T, 3C) from dout (B, T, C) and forward's inputs and outputs."""
    arguments = dqkv, dout, qkv, out, logsumexp, head_count
    ours = partial(_own_backward, device, *arguments)
    if device.cudnn_attention is None:
        return ours()
    return device.faster_of("attention backward", dqkv, partial(device.cudnn_attention.backward, *arguments), ours)


def _own_backward(device, dqkv, dout, qkv, out, logsumexp, head_count):
    B, T, C = out.shape
    deltas = device.scratch("deltas", (B, head_count, T), np.float32)
    arguments = (deltas, dout, out, *int32(B * T * head_count, T, head_count, C // head_count))
    grid = (math.ceil(out.nbytes / ACCESS_BYTES / THREADS),)
    device.launch("attention_backward", storage(out), "attention_deltas", grid, (THREADS,), arguments)
    arguments = (dqkv, dout, qkv, logsumexp, deltas)
    _launch(device, "attention_backward", "backward_queries", 2, KEYS, arguments, out.shape, head_count)
    _launch(device, "attention_backward", "backward_keys", 2, QUERIES, arguments, out.shape, head_count)


def assert_head_size(head_size: int) -> None:
    """Raise a UserError if there is no kernel for heads of that many channels."""
    if head_size not in HEAD_SIZES:
        raise UserError(
            f"heads of {head_size} channels, expected 64 or 128 on a GPU: choose --n-embd and --n-head for it, "
            "or --backend numpy"
        )


def _launch(device, source, name, kept, other, arrays, shape, head_count, first=0):
    """Launch the kernel for the head size. Shared memory holds `kept` blocks' rows, and two buffers of two tiles.

    Tiles before row `first` get no blocks, because the forward kernels count tiles from the end.
    """
    B, T, C = shape
    head_size = C // head_count
    assert_head_size(head_size)
    kind = storage(arrays[0])
    item_bytes = arrays[0].itemsize
    rows = ROWS[kind, head_size]
    shared_bytes = (kept * rows + 4 * other[kind, head_size]) * (head_size * item_bytes + ACCESS_BYTES)
    grid = (math.ceil(T / rows) - first // rows, head_count, B)
    arguments = (*arrays, *int32(T, head_count))
    device.launch(source, kind, f"attention_{name}_{head_size}", grid, BLOCK, arguments, shared_bytes)
