"""The kernels a GPT-2 step is made of, and the sets that implement them.

Every set offers the functions below with the same arguments: outputs first, a `d` prefix for the gradient of a thing.
A backward kernel whose last argument is `accumulate` writes its parameter gradients, or adds to them if it is true
(the later micro-steps of a step). What linear_gelu_forward and classifier_forward leave for their backwards (`saved`,
`exponentials`, `row_scale`) is the set's own business. Shapes: B sequences, T positions, C channels, H heads, V tokens
(Vp padded); N stands for B*T rows. Arrays come from `empty`, and no kernel allocates a large one.
"""

from functools import partial
from types import SimpleNamespace

from gpt2.errors import UserError

KERNELS = (
    "empty",
    "embedding_forward",
    "embedding_backward",
    "layernorm_forward",
    "residual_layernorm_forward",
    "layernorm_backward",
    "linear_forward",
    "linear_backward",
    "linear_gelu_forward",
    "gelu_backward",
    "attention_forward",
    "attention_backward",
    "classifier_forward",
    "classifier_backward",
    "sum_of_squares",
    "adamw",
)


def load_kernels(backend: str, threads: int) -> SimpleNamespace:
    """The kernels of `backend`, bound to the cores (or device) they run on: `kernels.gelu_forward(out, inputs)`."""
    if backend != "numpy":
        raise UserError(f"backend {backend} is not available, expected numpy: use --backend numpy")
    from gpt2 import numpy_kernels

    device = numpy_kernels.Cores(threads)
    return SimpleNamespace(**{name: partial(getattr(numpy_kernels, name), device) for name in KERNELS})
