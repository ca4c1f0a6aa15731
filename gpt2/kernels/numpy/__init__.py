"""GPT-2's kernels on CPU cores: BLAS products through NumPy, and compiled loops (`loops.py`) between them.

With --dtype bfloat16, `bfloat16.py` replaces the BLAS products. Each function's first argument is `cores`, the threads
that it may use (`cores.py`).
"""
# ruff: noqa: F401 - the functions of gpt2.kernels.KERNELS are imported here to be found by name

from gpt2.kernels.numpy.adamw import adamw, sum_of_squares
from gpt2.kernels.numpy.attention import attention_backward, attention_forward
from gpt2.kernels.numpy.bfloat16 import bfloat16_cores
from gpt2.kernels.numpy.classifier import classifier_backward, classifier_forward
from gpt2.kernels.numpy.cores import Cores, empty, to_host
from gpt2.kernels.numpy.layers import (
    add,
    column_sums,
    embedding_backward,
    embedding_forward,
    gelu_linear_backward,
    layernorm_backward,
    layernorm_forward,
    linear_backward,
    linear_forward,
    linear_gelu_forward,
    residual_layernorm_forward,
)
