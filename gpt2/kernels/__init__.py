"""The kernels of a GPT-2 step, and the two sets that implement them.

Every set offers the functions below with the same arguments: outputs first; a `d` prefix names a gradient. With
`accumulate`, a backward kernel adds to its parameter gradients (all microbatches but the first), else it writes them.
Each set decides what linear_gelu_forward and classifier_forward store in `saved`, `exponentials` and `row_scale` for
their backwards. Shapes: B sequences, T positions, C channels, H heads, V tokens (Vp padded), N = B*T rows. Arrays come
from `empty`, and no kernel allocates a large one.

A branch is the output of half a block. residual_layernorm_forward adds it, and the bias of the branch's last product,
to the residual stream. layernorm_backward writes the gradient of that sum and sums its columns, which
gives the bias gradient.

Tokens and targets are host (NumPy) integers in every set, sum_of_squares returns a Python float, and to_host a NumPy
array. All other arrays belong to the set: NumPy or CuPy arrays. Parameters, activations and gradients have one dtype.
Numbers kept for each row (mean, rstd, losses, logsumexp, row_scale) and adamw's m and v are float32 at least.

With a vocabulary shard, embedding and classifier kernels get its first_token, and classifier_forward also tp_group
(gpt2.model_shards.OneShard has its methods); wpe and its gradient are None on tp ranks that do not hold them. With a
sparse embedding gradient, classifier kernels also get `blocks`, and classifier_forward target_rows; only in numpy.

A bound set also has operand_dtype: the dtype of activations that are only operands of products (gpt2/activations.py),
bfloat16 on CPUs. None means the parameters' dtype.

The numpy set's adamw also takes FactoredGradients (numpy/factors.py), in which some matrices are products of factors.
With bfloat16 parameters (cupy only) adamw also gets the float32 master copy that gpt2.optimizer.AdamW keeps. It updates
the master copy, and rounds it into the parameters.
"""

from functools import partial
from types import SimpleNamespace

from gpt2.errors import UserError

KERNELS = (
    "empty",
    "to_host",
    "add",
    "column_sums",
    "embedding_forward",
    "embedding_backward",
    "layernorm_forward",
    "residual_layernorm_forward",
    "layernorm_backward",
    "linear_forward",
    "linear_backward",
    "linear_gelu_forward",
    "gelu_linear_backward",
    "attention_forward",
    "attention_backward",
    "classifier_forward",
    "classifier_backward",
    "sum_of_squares",
    "adamw",
)


def load_kernels(
    backend: str, threads: int, gpu: int = 0, tf32: bool = False, dtype: str = "float32"
) -> SimpleNamespace:
    """Return the kernels of `backend`, numpy or cupy, bound to their `device`: `kernels.sum_of_squares(flat)`.

    numpy: `threads` cores; dtype "bfloat16" rounds the operands of products to bfloat16; UserError if numba is told not
    to compile. cupy: the `gpu`-th of the GPUs that this process sees; UserError if there is none; tf32: float32
    products use the tensor cores, with 10 bits of mantissa.
    """
    if backend == "numpy":
        import numba

        if numba.config.DISABLE_JIT:
            raise UserError(
                "NUMBA_DISABLE_JIT is set, expected unset: on CPU cores the loops run only as numba compiles them: "
                "unset it"
            )
        from gpt2.kernels import numpy as kernel_set

        device = (kernel_set.Cores if dtype == "float32" else kernel_set.bfloat16_cores)(threads)
    else:
        from gpt2.kernels import cupy as kernel_set

        device = kernel_set.Device(gpu, tf32=tf32)
    return bind(kernel_set, device)


def bind(kernel_set, device) -> SimpleNamespace:
    """Return a kernel set's functions with `device` bound as their first argument, and `device`."""
    functions = {name: partial(getattr(kernel_set, name), device) for name in KERNELS}
    return SimpleNamespace(**functions, device=device, operand_dtype=getattr(device, "operand_dtype", None))
