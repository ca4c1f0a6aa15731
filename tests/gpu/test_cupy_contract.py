"""The cupy kernel set against the contract: the same functions and arguments as NumPy's, a whole model, clear refusals.

The model runs its CUDA kernels on a CPU (cuda_shim), its matrix products in NumPy.
"""

import inspect
import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.config import PRESETS, GPT2Config
from gpt2.errors import UserError
from gpt2.inference.cached_model import CachedGPT2
from gpt2.inference.generated_text import Sampling, generate
from gpt2.kernels import KERNELS, bind, load_kernels
from gpt2.kernels import cupy as cupy_kernels
from gpt2.kernels import numpy as numpy_kernels
from gpt2.kernels.cupy.attention import assert_head_size
from gpt2.kernels.cupy.device import WORKSPACE_BYTES
from gpt2.model import new_model
from gpt2.parameters import initialize
from tests.gpu.cuda_shim.memory import to_bfloat16, widen
from tests.gpu.cuda_shim.shim import Shim, lasting_build

CONFIG = GPT2Config(n_layer=2, n_head=1, n_embd=64, context=80, vocab_size=250)
B, T = 2, 70
DTYPES = {"float32": np.float32, "bfloat16": np.uint16}
TOLERANCES = {"float32": 2e-5, "bfloat16": 0.06}


# Of a vocabulary whose rows are not all there at once: on cores alone so far.
OF_BLOCKS = {"blocks", "target_rows"}


@pytest.mark.parametrize("name", KERNELS)
def test_both_sets_take_the_same_arguments(name):
    (_, *numpy_arguments), (_, *cupy_arguments) = (
        inspect.signature(getattr(kernel_set, name)).parameters.items() for kernel_set in (numpy_kernels, cupy_kernels)
    )
    numpy_arguments = [(argument, p) for argument, p in numpy_arguments if argument not in OF_BLOCKS]
    assert [argument for argument, _ in numpy_arguments] == [argument for argument, _ in cupy_arguments]
    defaults = [[p.default for _, p in arguments] for arguments in (numpy_arguments, cupy_arguments)]
    assert defaults[0] == defaults[1]


def test_the_set_is_complete():
    assert {name for name, value in vars(cupy_kernels).items() if callable(value)} - {"Device"} == set(KERNELS)


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "in epilogues"])
def shim(request):
    return Shim(lasting_build(), fused=request.param)


def models(shim, storage):
    """(on the CUDA kernels, on NumPy's) with the same parameters, rounded to the storage."""
    ours = new_model(CONFIG, bind(cupy_kernels, shim), B, T, DTYPES[storage])
    reference = new_model(CONFIG, load_kernels("numpy", 1), B, T)
    initialize(reference.parameters, seed=3)
    reference.parameters.flat[:] *= 3  # attention and GELU far from linear
    if storage == "bfloat16":
        reference.parameters.flat[:] = widen(to_bfloat16(reference.parameters.flat))
        ours.parameters.flat[:] = to_bfloat16(reference.parameters.flat)
    else:
        ours.parameters.flat[:] = reference.parameters.flat
    return ours, reference


def batches(count):
    tokens = np.random.default_rng(5).integers(CONFIG.vocab_size, size=(count, B, T + 1)).astype(np.int32)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def relative_error(ours, reference):
    return np.linalg.norm(widen(ours) - reference) / np.linalg.norm(reference)


@pytest.mark.parametrize("storage", DTYPES)
def test_a_model_on_the_cuda_kernels(shim, storage):
    """Losses, and every gradient after two micro-steps. The key biases' gradient is 0 but for rounding: left out."""
    ours, reference = models(shim, storage)
    for micro_step, (tokens, targets) in enumerate(batches(2)):
        losses = [model.forward(tokens, targets, 0.5 / tokens.size) for model in (ours, reference)]
        assert losses[0] == pytest.approx(losses[1], rel=TOLERANCES[storage] / 10)
        assert shim.spare is None, "backward needs dlogits"
        for model in (ours, reference):
            model.backward(accumulate=micro_step > 0)
        assert shim.spare is ours.kept[0].exponentials
    for tensor in ours.parameters.layout.tensors:
        got, expected = (model.gradients.view(tensor.name) for model in (ours, reference))
        if tensor.name.endswith("qkv_bias"):
            C = CONFIG.n_embd
            got, expected = np.delete(got, slice(C, 2 * C)), np.delete(expected, slice(C, 2 * C))
        assert relative_error(got, expected) < TOLERANCES[storage], tensor.name
    alone = ours.token_losses(tokens, targets)
    np.testing.assert_allclose(alone, reference.token_losses(tokens, targets), rtol=TOLERANCES[storage], atol=1e-3)


@pytest.mark.parametrize("storage", DTYPES)
def test_a_cached_model_on_the_cuda_kernels(shim, storage):
    """Logits of a text in pieces, to the end of the context, whose last rows lie in a second tile of attention."""
    ours, reference = (CachedGPT2(model.kernels, model.parameters) for model in models(shim, storage))
    text = np.random.default_rng(6).integers(CONFIG.vocab_size, size=CONFIG.context)
    for start, stop in pairwise([0, 5, 6, 61, 70, 71, 80]):
        expected = reference.forward(text[start:stop])
        logits = ours.forward(text[start:stop])
        assert logits.dtype == np.float32
        assert relative_error(logits, expected) < TOLERANCES[storage]


def test_the_same_text_as_by_numpys_kernels(shim):
    """Twice beyond the context."""
    texts = []
    for model in models(shim, "float32"):
        choose = partial(Sampling().choose, random=np.random.default_rng(7))
        texts.append([*generate(CachedGPT2(model.kernels, model.parameters), [3, 1, 4], choose, 130)])
    assert texts[0] == texts[1]
    assert len({*texts[0]}) > 50


def test_a_step_of_124m_takes_no_more_memory_than_llmc():
    """At B = 64 in bfloat16, with gradients, the float32 master copy, both moments and cuBLASLt's workspace: 29 GB. The
    dlogits have room for what cuDNN takes of an H100 for attention's backward."""
    config, allocated = PRESETS["gpt2-124M"], []

    def empty(shape, dtype):
        allocated.append(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.broadcast_to(np.zeros(1, dtype), shape)

    model = new_model(config, SimpleNamespace(empty=empty, operand_dtype=None), 64, 1024, np.uint16)
    assert sum(allocated) + 12 * model.parameters.layout.size + WORKSPACE_BYTES <= 29e9
    assert model.kept[0].exponentials.nbytes >= 64 * 12 * 1024 * 64 * 4 * 8


@pytest.mark.parametrize("head_size", [16, 80, 256])
def test_other_head_sizes_are_refused(head_size):
    with pytest.raises(UserError, match="expected 64 or 128 on a GPU"):
        assert_head_size(head_size)
