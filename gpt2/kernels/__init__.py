"""The kernels a GPT-2 step is made of, and the sets that implement them.

Every set offers the functions below with the same arguments: outputs first, a `d` prefix for the gradient of a thing.
A backward kernel whose last argument is `accumulate` writes its parameter gradients, or adds to them if it is true
(the later microbatches of a step). What linear_gelu_forward and classifier_forward leave for their backwards (`saved`,
`exponentials`, `row_scale`) is the set's own business. Shapes: B sequences, T positions, C channels, H heads, V tokens
(Vp padded); N stands for B*T rows. Arrays come from `empty`, and no kernel allocates a large one.

A branch is what half a block adds to the residual stream. residual_layernorm_forward reads it and adds the bias of its
last product. layernorm_backward writes the gradient of that sum and sums its columns: the bias gradient.

Tokens and targets are host (NumPy) integers in every set, what sum_of_squares returns is a Python float, and what
to_host returns is a NumPy array. All other arrays are the set's own: NumPy's or CuPy's. Parameters, activations and
gradients have one dtype, that of the parameters. What is kept of a row (mean, rstd, losses, logsumexp, row_scale) and
adamw's m and v are float32 at least.

With a vocabulary shard, embedding and classifier kernels get its first_token, and classifier_forward also tp_group
(gpt2.model_shards.OneShard has its methods); wpe and its gradient are None on tp ranks that do not hold them. With a
sparse embedding gradient, classifier kernels get `blocks`, and classifier_forward target_rows: in numpy only.

With operand_dtype, which the bound set has beside its functions, activations that are only ever operands of products
are of that dtype (gpt2/activations.py; dqkv, dfc): bfloat16 on CPUs. None: of the parameters'.

With bfloat16 parameters (cupy only) adamw also gets the float32 master copy that gpt2.optimizer.AdamW keeps: it makes
its step on that, and rounds it into the parameters.
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
    """The kernels of `backend`, bound to what they run on, their `device`: `kernels.sum_of_squares(flat)`.

    numpy: `threads` cores; dtype "bfloat16" rounds the operands of products to that; UserError where numba is told not
    to compile. cupy: the `gpu`-th of the GPUs that this process sees; UserError where there is none.
    tf32: float32 products keep 10 bits of mantissa, on its tensor cores.
    """
    if backend == "numpy":
        check_compiles()
        from gpt2.kernels import numpy as kernel_set

        device = (kernel_set.Cores if dtype == "float32" else kernel_set.bfloat16_cores)(threads)
    elif backend == "cupy":
        from gpt2.kernels import cupy as kernel_set

        device = kernel_set.Device(gpu, tf32=tf32)
    else:
        raise UserError(f"backend {backend} is not available, expected numpy or cupy: use --backend numpy")
    return bind(kernel_set, device)


def check_compiles() -> None:
    """UserError where numba is told to leave its loops to Python."""
    import numba

    if numba.config.DISABLE_JIT:
        raise UserError(
            "NUMBA_DISABLE_JIT is set, expected unset: on CPU cores the loops run only as numba compiles them: unset it"
        )


def bind(kernel_set, device) -> SimpleNamespace:
    """The functions of a kernel set with their first argument filled in, and that argument: `device`."""
    functions = {name: partial(getattr(kernel_set, name), device) for name in KERNELS}
    return SimpleNamespace(**functions, device=device, operand_dtype=getattr(device, "operand_dtype", None))
