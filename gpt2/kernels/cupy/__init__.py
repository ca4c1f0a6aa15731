"""GPT-2's kernels on an NVIDIA GPU, in CUDA C++ under CuPy. CONTRIBUTING.md explains how they are tested.

*.cu          the kernels, one subject per file, with their formulas, shapes and launch geometry; *.cuh: shared code
compile.py    NVRTC: a .cu file to machine code, without a GPU      libraries.py  where NVIDIA's libraries are
launch.py, attention.py, linear.py, classifier.py   the contract's functions: launches, written once for GPU and shim
cublaslt.py   cuBLASLt through ctypes                               matmul.py     products and epilogues with it
cudnn_attention.py   cuDNN's attention, if it is installed          faster_of.py  times our kernels and theirs
device.py     a GPU

Each function's first argument is `device`, the GPU it runs on. Nothing here imports CuPy before a Device is made.
"""
# ruff: noqa: F401 - the functions of gpt2.kernels.KERNELS are imported here to be found by name

import numpy as np

from gpt2.kernels.cupy.attention import attention_backward, attention_forward
from gpt2.kernels.cupy.classifier import classifier_backward, classifier_forward
from gpt2.kernels.cupy.device import Device
from gpt2.kernels.cupy.launch import (
    adamw,
    add,
    column_sums,
    embedding_backward,
    embedding_forward,
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_forward,
    sum_of_squares,
)
from gpt2.kernels.cupy.linear import gelu_linear_backward, linear_backward, linear_forward, linear_gelu_forward


def empty(device, shape, dtype=np.float32):
    """Return zeros on the device, for activations, gradients or state."""
    return device.empty(shape, dtype)


def to_host(device, array) -> np.ndarray:
    """Return a copy in host memory, made after all work queued before; bfloat16 becomes float32."""
    host = device.download(array)
    return host if host.itemsize == 4 else (host.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
