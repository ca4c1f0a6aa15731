"""Causal self-attention on the device: the launches of attention.cu, or cuDNN's where that is faster."""

import math
from functools import partial

import numpy as np

from gpt2.cupy_kernels.launch import THREADS, WARP, int32, storage
from gpt2.errors import UserError

HEAD_SIZES = (64, 128)
ROWS = 64  # of the side that a block keeps
COLUMNS = {"float32": 32, "bfloat16": 64}  # of a tile of the other side
BLOCK = (128,)
PAD_BYTES = 16


def attention_forward(device, out, logsumexp, qkv, head_count):
    """out (B, T, C); logsumexp (B, H, T) float32, kept for backward; qkv (B, T, 3C): queries, keys, values."""

    def ours():
        _launch(device, "attention_forward", ROWS, (out, logsumexp, qkv), out.shape, head_count)

    if device.cudnn_attention is None:
        return ours()
    arguments = out, logsumexp, qkv, head_count
    return device.faster_of("attention", out, partial(device.cudnn_attention.forward, *arguments), ours)


def attention_backward(device, dqkv, dout, qkv, out, logsumexp, head_count):
    """dqkv (B, T, 3C) from dout (B, T, C) and what forward saw and kept."""
    arguments = dqkv, dout, qkv, out, logsumexp, head_count
    ours = partial(_own_backward, device, *arguments)
    if device.cudnn_attention is None:
        return ours()
    return device.faster_of("attention backward", dqkv, partial(device.cudnn_attention.backward, *arguments), ours)


def _own_backward(device, dqkv, dout, qkv, out, logsumexp, head_count):
    B, T, C = out.shape
    deltas = device.scratch("deltas", (B, head_count, T), np.float32)
    rows = B * T * head_count
    arguments = (deltas, dout, out, *int32(rows, T, head_count, C // head_count))
    grid = (math.ceil(rows / (THREADS // WARP)),)
    device.launch("attention", storage(out), "attention_deltas", grid, (THREADS,), arguments)
    arguments = (dqkv, dout, qkv, logsumexp, deltas)
    for name in ("attention_backward_queries", "attention_backward_keys"):
        _launch(device, name, 2 * ROWS, arguments, (B, T, C), head_count)


def assert_head_size(head_size: int) -> None:
    """UserError where there is no kernel for heads of that many channels."""
    if head_size not in HEAD_SIZES:
        raise UserError(
            f"heads of {head_size} channels, expected 64 or 128 on a GPU: choose --n-embd and --n-head for it, "
            "or --backend numpy"
        )


def _launch(device, name, kept_rows, arrays, shape, head_count):
    """Launch `name` for the head size, with `kept_rows` and two buffers of two tiles in shared memory."""
    B, T, C = shape
    head_size = C // head_count
    assert_head_size(head_size)
    kind, item_bytes = storage(arrays[0]), arrays[0].itemsize
    shared_bytes = (kept_rows + 4 * COLUMNS[kind]) * (head_size * item_bytes + PAD_BYTES)
    grid = (math.ceil(T / ROWS), head_count, B)
    arguments = (*arrays, *int32(T, head_count))
    device.launch("attention", kind, f"{name}_{head_size}", grid, BLOCK, arguments, shared_bytes)
