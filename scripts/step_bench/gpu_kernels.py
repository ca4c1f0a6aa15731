"""Time each GPU kernel of a step, and count the fewest bytes and operations that it needs.

An array counts once in a kernel's bytes if it is read or written, twice if it is changed in place. Scratch memory does
not count. Floating point operations are those of matrix products; of attention's products, only the half below the
diagonal counts. Kernels that are meaningful only together share a row.
"""

from collections import Counter, defaultdict
from contextlib import contextmanager


def _bytes(*arrays) -> int:
    return sum(array.nbytes for array in arrays if array is not None)


def _embedding_rows(stream, table) -> int:
    """Return the bytes of the table's rows that B*T tokens can touch."""
    return min(stream.nbytes, table.nbytes)


def _positions(dwpe, dout, B, T, context, C, accumulate, *_):
    return T * C * dwpe.itemsize * (2 if accumulate else 1)


def _layernorm_rows(dinputs, partial_sums, *others):
    return 2 * dinputs.nbytes + _bytes(*others[:5])


# Kernel: (its row, its bytes computed from its launch arguments; see gpt2/kernels/cupy/launch.py, attention.py).
ROWS = {
    "embedding_forward": ("embedding_forward", lambda out, tokens, wte, wpe, rows, N, T, C: (
        _bytes(out, tokens) + _embedding_rows(out, wte) + int(T) * int(C) * wpe.itemsize)),
    "embedding_backward_tokens": ("embedding_backward", lambda dwte, dout, order, tokens, *_: (
        _bytes(dout, tokens) + 2 * _embedding_rows(dout, dwte))),
    "embedding_backward_positions": ("embedding_backward", _positions),
    "add": ("add", lambda out, first, second, bias, *_: _bytes(out, first, second, bias)),
    "residual_layernorm_forward": ("residual_layernorm_forward", lambda *a: _bytes(*a[:9])),
    "layernorm_backward": ("layernorm_backward", _layernorm_rows),
    "layernorm_backward_parameters": ("layernorm_backward", lambda *a: _bytes(*a[:3])),
    "bias_gelu_forward": ("bias_gelu_forward", lambda out, saved, bias, *_: _bytes(out, saved, saved, bias)),
    "gelu_backward": ("gelu_backward", lambda dx, saved, *_: _bytes(dx, dx, saved)),
    "column_sums": ("column_sums", lambda partial, rows, *_: _bytes(rows)),
    "sum_of_column_sums": ("column_sums", lambda sums, *_: _bytes(sums)),
    "cross_entropy": ("cross_entropy", lambda losses, logits, targets, *a: (
        _bytes(losses, targets, logits) + (logits.nbytes if a[-1] else 0))),
    "row_statistics": ("cross_entropy", lambda maxima, sums, own, logits, *_: _bytes(logits)),
    "rescale_sums": ("cross_entropy", lambda *_: 0),
    "losses_over_shards": ("cross_entropy", lambda losses, *_: _bytes(losses)),
    "gradient_of_shard": ("cross_entropy", lambda logits, targets, *_: _bytes(logits, logits, targets)),
    "adamw": ("adamw", lambda p, m, v, gradients, *a: 2 * _bytes(p, m, v) + _bytes(gradients, a[-3])),  # a[-3]: rounded
    "round_parameters": ("adamw", lambda rounded, values, *_: _bytes(rounded, values)),
    "sum_of_squares": ("sum_of_squares", lambda partial, flat, *_: _bytes(flat)),
    "sum_of_partials": ("sum_of_squares", lambda *_: 0),
    "attention_forward": ("attention_forward", lambda *a: _bytes(*a[:3])),
    "attention_deltas": ("attention_backward", lambda deltas, dout, out, *_: _bytes(out)),
    "attention_backward_queries": ("attention_backward", lambda dqkv, dout, qkv, logsumexp, *_: (
        _bytes(dqkv, dout, qkv, logsumexp))),
    "attention_backward_keys": ("attention_backward", lambda *_: 0),
}  # fmt: skip
# Number of products of 2 T T D operations per head, half of them masked. One kernel carries all of backward's products.
ATTENTION_PRODUCTS = {"attention_forward": 2, "attention_backward_queries": 5}


def launch_work(kernel: str, arguments) -> tuple[str, int, int]:
    """Return (row, bytes, floating point operations) of a launch. kernel: may end in a head size."""
    kernel = kernel.removesuffix("_64").removesuffix("_128")
    row, count_bytes = ROWS[kernel]
    flops = 0
    if kernel in ATTENTION_PRODUCTS:
        flops = attention_flops(ATTENTION_PRODUCTS[kernel], arguments[2].shape)
    return row, int(count_bytes(*arguments)), flops


def attention_flops(products: int, packed_shape) -> int:
    """Return the operations of several products over all heads, for packed queries, keys and values (B, T, 3C)."""
    B, T, width = packed_shape
    return products * B * T * T * (width // 3)


def matmul_work(out, left, right, options) -> tuple[str, int, int]:
    """Return (row, bytes, floating point operations) of device.matmul(out, left, right, **options)."""
    M, N = out.shape
    K = left.shape[1]
    extra = [name for name in ("bias", "gelu_input", "dgelu_input", "left_sums") if options.get(name) is not None]
    accumulates = bool(options.get("accumulate"))
    row = " + ".join([f"product {M} x {N} x {K}", *extra]) + (", added" if accumulates else "")
    total = _bytes(out, left, right, *(options[name] for name in extra)) + (out.nbytes if accumulates else 0)
    return row, total, 2 * M * N * K


class TimedAttention:
    """cuDNN's attention, with each run inside the context manager between(row, bytes, floating point operations)."""

    def __init__(self, attention, between):
        self._attention = attention
        self._between = between

    def forward(self, out, logsumexp, qkv, head_count):
        with self._between("cudnn_forward", _bytes(out, logsumexp, qkv), attention_flops(2, qkv.shape)):
            self._attention.forward(out, logsumexp, qkv, head_count)

    def backward(self, dqkv, dout, qkv, out, logsumexp, head_count):
        with self._between("cudnn_backward", _bytes(dqkv, dout, qkv, out, logsumexp), attention_flops(5, qkv.shape)):
            self._attention.backward(dqkv, dout, qkv, out, logsumexp, head_count)


class KernelTimes:
    """Times every kernel of a gpt2.kernels.cupy.Device with events, inside `recording()`.

    rows: after the block, the sums of launches, ms, bytes and flops by row name.
    """

    def __init__(self, device):
        self.rows = defaultdict(Counter)
        self._device = device
        self._events = []

    @contextmanager
    def recording(self):
        """Time each launch and product inside the block."""
        device = self._device
        cudnn = device.cudnn_attention
        launch = device.launch
        matmul = device.matmul

        def timed_launch(source, storage, kernel, grid, block, arguments, shared_bytes=0):
            with self._between_events(*launch_work(kernel, arguments)):
                launch(source, storage, kernel, grid, block, arguments, shared_bytes)

        def timed_matmul(out, left, right, **options):
            with self._between_events(*matmul_work(out, left, right, options)):
                matmul(out, left, right, **options)

        device.launch = timed_launch
        device.matmul = timed_matmul
        device.cudnn_attention = None if cudnn is None else TimedAttention(cudnn, self._between_events)
        try:
            yield
        finally:
            del device.launch  # restores the method of the class
            device.matmul = matmul
            device.cudnn_attention = cudnn
        device.synchronize()
        for row, start, stop in self._events:
            self.rows[row]["ms"] += device.elapsed_ms(start, stop)

    @contextmanager
    def _between_events(self, row: str, byte_count: int, flops: int):
        start = self._device.new_event()
        stop = self._device.new_event()
        start.record(self._device.stream)
        yield
        stop.record(self._device.stream)
        self._events.append((row, start, stop))
        self.rows[row].update(launches=1, bytes=byte_count, flops=flops)
