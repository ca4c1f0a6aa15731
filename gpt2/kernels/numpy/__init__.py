"""GPT-2's kernels on CPU cores: BLAS products through NumPy, and compiled loops (`loops.py`) between them.

Each function's first argument is `cores`, the threads it may use (`cores.py`).
"""

from gpt2.kernels.numpy.adamw import adamw, sum_of_squares
from gpt2.kernels.numpy.attention import attention_backward, attention_forward
from gpt2.kernels.numpy.classifier import classifier_backward, classifier_forward
from gpt2.kernels.numpy.cores import Cores, empty
from gpt2.kernels.numpy.embedding import embedding_backward, embedding_forward
from gpt2.kernels.numpy.layernorm import layernorm_backward, layernorm_forward, residual_layernorm_forward
from gpt2.kernels.numpy.linear import gelu_linear_backward, linear_backward, linear_forward, linear_gelu_forward

__all__ = [
    "Cores",
    "adamw",
    "attention_backward",
    "attention_forward",
    "classifier_backward",
    "classifier_forward",
    "embedding_backward",
    "embedding_forward",
    "empty",
    "gelu_linear_backward",
    "layernorm_backward",
    "layernorm_forward",
    "linear_backward",
    "linear_forward",
    "linear_gelu_forward",
    "residual_layernorm_forward",
    "sum_of_squares",
]
