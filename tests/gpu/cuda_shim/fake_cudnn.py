"""nvidia-cudnn-frontend's causal attention in Python, on host memory: tensors by address, dimensions and strides.

In place of the module `cudnn`: as much of it as gpt2/kernels/cupy/cudnn_attention.py uses, by the frontend's own words.
"""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np

from tests.gpu.cuda_shim.fake_streams import stream_at
from tests.gpu.cuda_shim.memory import to_bfloat16, widen

BFLOAT16, FLOAT = "bfloat16", "float"
KINDS = {BFLOAT16: ctypes.c_uint16, FLOAT: ctypes.c_float}


class cudnnGraphNotSupportedError(Exception):
    """No RuntimeError, as in the frontend."""


class Tensor:
    def __init__(self, dim=None, stride=None, data_type=BFLOAT16, uid=None, name=""):
        self.dim, self.stride, self.data_type, self.uid, self.is_output = dim, stride, data_type, uid, False

    def set_output(self, value):
        self.is_output = value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_uid(self, uid):
        self.uid = uid
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def at(self, address):
        """A view (B, H, T, D) of what lies there."""
        kind = KINDS[self.data_type]
        size = sum((length - 1) * step for length, step in zip(self.dim, self.stride, strict=True)) + 1
        flat = np.ctypeslib.as_array((kind * size).from_address(address))
        return np.lib.stride_tricks.as_strided(flat, self.dim, [step * flat.itemsize for step in self.stride])


class Graph:
    """cudnn.pygraph."""

    is_supported = True

    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert (io_data_type, intermediate_data_type, compute_data_type) == (BFLOAT16, FLOAT, FLOAT)
        self._tensors, self._work = [], None

    def tensor(self, **options):
        self._tensors.append(Tensor(**options))
        return self._tensors[-1]

    def _outputs(self, count):
        self._tensors += [Tensor() for _ in range(count)]
        return self._tensors[-count:]

    def sdpa(self, q, k, v, generate_stats, name, attn_scale, diagonal_alignment, diagonal_band_right_bound):
        assert (generate_stats, diagonal_alignment, diagonal_band_right_bound) == (True, "top left", 0)
        out, statistics = self._outputs(2)

        def work(read, write):
            scores = causal(read(q) @ read(k).swapaxes(2, 3) * attn_scale)
            logsumexp = np.log(np.exp(scores).sum(3, keepdims=True))
            write(out, np.exp(scores - logsumexp) @ read(v))
            write(statistics, logsumexp)

        self._work = work
        return out, statistics

    def sdpa_backward(
        self, q, k, v, o, dO, stats, use_deterministic_algorithm, name, attn_scale, diagonal_alignment,
        diagonal_band_right_bound,
    ):  # fmt: skip
        assert use_deterministic_algorithm, "training gets the same bits every time"
        assert (diagonal_alignment, diagonal_band_right_bound) == ("top left", 0)
        dq, dk, dv = self._outputs(3)

        def work(read, write):
            p = np.exp(causal(read(q) @ read(k).swapaxes(2, 3) * attn_scale) - read(stats))
            delta = (read(dO) * read(o)).sum(3, keepdims=True)
            ds = p * (read(dO) @ read(v).swapaxes(2, 3) - delta) * attn_scale
            gradients = ds @ read(k), ds.swapaxes(2, 3) @ read(q), p.swapaxes(2, 3) @ read(dO)
            for tensor, gradient in zip((dq, dk, dv), gradients, strict=True):
                write(tensor, gradient)

        self._work = work
        return dq, dk, dv

    def validate(self):
        assert all(tensor.uid and tensor.dim and tensor.stride for tensor in self._tensors)

    def build_operation_graph(self):
        pass

    def create_execution_plans(self, modes):
        assert modes == ["A"]

    def check_support(self):
        if not Graph.is_supported:
            raise cudnnGraphNotSupportedError("no engine")

    def build_plans(self):
        pass

    def get_workspace_size(self):
        return 64

    def execute(self, addresses, workspace, handle):
        assert set(addresses) == {tensor.uid for tensor in self._tensors}
        assert workspace

        def read(tensor):
            return widen(tensor.at(addresses[tensor.uid]))

        def write(tensor, values):
            out = tensor.at(addresses[tensor.uid])
            out[...] = to_bfloat16(values) if out.dtype == np.uint16 else values

        stream_at(handle.stream).add(lambda: self._work(read, write))


def causal(scores):
    return np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)


def set_stream(handle, stream):
    handle.stream = stream


def install(monkeypatch, is_supported=True):
    """Put it into sys.modules for one test; not supported: a cuDNN without an engine for any graph."""
    monkeypatch.setattr(Graph, "is_supported", is_supported)
    module = SimpleNamespace(
        pygraph=Graph, backend_version=lambda: 92000, create_handle=SimpleNamespace, set_stream=set_stream,
        cudnnGraphNotSupportedError=cudnnGraphNotSupportedError, heur_mode=SimpleNamespace(A="A"),
        data_type=SimpleNamespace(BFLOAT16=BFLOAT16, FLOAT=FLOAT),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cudnn", module)
