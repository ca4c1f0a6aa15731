"""--dtype bfloat16 on CPUs: products by each form of it, against float64 sums of rounded operands; then the kernels."""

import itertools
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from ml_dtypes import bfloat16

from gpt2.config import GPT2Config
from gpt2.kernels import bind, load_kernels
from gpt2.kernels import numpy as numpy_kernels
from gpt2.kernels.numpy import amx_bf16, bf16_products, loops
from gpt2.kernels.numpy.bfloat16 import DotProductCores, TileCores, WideningCores
from gpt2.model import new_model
from gpt2.parameters import initialize

# Without the instructions a form that needs them is compiled only: test_the_instructions_are_compiled_anywhere.
FORMS = [WideningCores]
FORMS += [DotProductCores] if bf16_products.available() else []
FORMS += [TileCores] if amx_bf16.available() else []
STEP = 2.0**-8  # of bfloat16: the largest relative error of rounding


@pytest.fixture(
    params=[(form, threads) for form in FORMS for threads in (1, 2, 3)], ids=lambda p: f"{p[0].__name__} {p[1]}"
)
def cores(request):
    form, threads = request.param
    return form(threads)


@pytest.fixture
def k(cores):
    return bind(numpy_kernels, cores)


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def exact(array):
    """What a product makes of it, in float64."""
    return array.astype(bfloat16).astype(np.float64)


def assert_near(found, expected, tolerance):
    """Relative to the whole array's norm: single sums may cancel."""
    error = np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < tolerance, error


def laid_out(array, dtype, is_turned):
    """The same numbers in that dtype, as rows or as the transposed view of rows."""
    array = array.astype(dtype)
    return np.ascontiguousarray(array.T).T if is_turned else array


ORDERS = list(itertools.product((np.float32, bfloat16), (False, True), (np.float32, bfloat16), (False, True)))


def double(result, rows, columns):
    result[:, columns] *= 2


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (5, 7, 3),
        (16, 48, 32),
        (32, 96, 64),
        (130, 1000, 67),
        (130, 49, 2050),
        (1030, 20, 64),
        (3, 2000, 40),
        (2, 3, 4100),
    ],
)
def test_products(cores, shape):
    """rows, columns, k: none divides by what is taken at once, or all do. Nothing beside the sums is written."""
    rows, columns, depth = shape
    a, b = random(rows, depth), random(depth, columns)
    expected = exact(a) @ exact(b)
    for a_dtype, a_turned, b_dtype, b_turned in ORDERS:
        left, right = laid_out(a, a_dtype, a_turned), laid_out(b, b_dtype, b_turned)
        room, rounded = np.full((rows + 2, columns + 3), 7, np.float32), np.empty((rows, columns), bfloat16)
        finished = np.empty((rows, columns), bfloat16)
        cores.matmuls((left, right, room[:rows, :columns], None), (left, right, rounded, None))
        cores.matmuls((left, right, finished, double))
        assert_near(room[:rows, :columns], expected, 2e-6)
        assert_near(finished, 2 * expected, STEP)
        assert (room[rows:] == 7).all()
        assert (room[:, columns:] == 7).all()
        assert_near(rounded, expected, STEP)


def test_the_order_of_a_sum_does_not_depend_on_the_threads():
    """Where the instructions are ours; BLAS promises nothing."""
    a, b = random(301, 1100), random(1100, 333)
    for form in set(FORMS) - {WideningCores}:
        outs = [np.empty((301, 333), np.float32) for _ in range(3)]
        for threads, out in enumerate(outs, 1):
            form(threads).matmuls((a, b, out, None))
        np.testing.assert_array_equal(outs[1:], [outs[0]] * 2)


def test_products_of_heads(cores):
    """Of views of a wider array, as attention has them: written, added, and rounded into another such view."""
    qkv, heads, T, size = random(2, 37, 3 * 5 * 24), 5, 37, 24
    for dtype in (np.float32, bfloat16):
        q, k, v = (part[1] for part in qkv.astype(dtype).reshape(2, T, 3, heads, size).transpose(2, 0, 3, 1, 4))
        scores = np.empty((heads, T, T), np.float32)
        cores.matmul(q, k.transpose(0, 2, 1), scores)
        expected = exact(q) @ exact(k).transpose(0, 2, 1)
        assert_near(scores, expected, 2e-6)
        total = np.full((heads, T, size), 3, np.float32)
        cores.matmul(scores.transpose(0, 2, 1), v, total, add=True)
        expected = exact(scores).transpose(0, 2, 1) @ exact(v)
        assert_near(total - 3, expected, 1e-5)
        out = np.full((T, 2, heads, size), 7, bfloat16)
        view = out[:, 1].transpose(1, 0, 2)
        cores.matmul(scores.transpose(0, 2, 1), v, view)
        assert_near(view, expected, STEP)
        assert (out[:, 0] == 7).all()


def test_what_cannot_be_added_to_is_refused(cores):
    with pytest.raises(ValueError, match="added to float32"):
        cores.matmul(np.ones((2, 3, 4)), np.ones((2, 4, 5)), np.ones((2, 3, 5), bfloat16), add=True)
    with pytest.raises(ValueError, match="added to float32"):
        cores.matmul(np.ones((3, 4)), np.ones((4, 5)), np.ones((3, 5), np.float32), add=True)


def test_numbers_that_are_not_finite_are_seen(cores):
    a, b = random(9, 40), random(40, 50)
    a[3, 7], a[5, 1] = np.nan, np.inf
    out = np.empty((9, 50), np.float32)
    with np.errstate(invalid="ignore"):
        cores.matmuls((a, b, out, None))
    assert np.isnan(out[3]).all()
    assert np.isinf(out[5]).all()
    assert np.isfinite(np.delete(out, [3, 5], axis=0)).all()


def test_what_is_kept_is_rounded_to_nearest_even():
    """Halfway numbers, the largest ones, and what is not finite; against ml_dtypes."""
    bits = np.random.default_rng(0).integers(2**32, size=100_000, dtype=np.uint32)
    bits[:40_000] &= 0xFFFF8000  # halfway between two of bfloat16, or one of them
    values = np.r_[bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38])]
    kept = np.empty((1, len(values)), np.uint16)
    loops.keep(kept, values.reshape(1, -1), slice(0, len(values)))
    with np.errstate(invalid="ignore"):
        expected = values.astype(bfloat16).astype(np.float32)
    np.testing.assert_array_equal(kept[0].view(bfloat16).astype(np.float32), expected)
    loops.round_off(values)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_linear(k, accumulate):
    x, w, b, dy = random(70, 36).astype(bfloat16), random(100, 36), random(100), random(70, 100)
    for dtype, tolerance in ((np.float32, 2e-6), (bfloat16, STEP)):
        out = np.empty((70, 100), dtype)
        k.linear_forward(out, x, w, b)
        assert_near(out, exact(x) @ exact(w).T + b, tolerance)
        dx, dw, db = np.empty((70, 36), np.float32), np.full_like(w, 3), np.full_like(b, 3)
        doutputs = dy.astype(dtype)
        k.linear_backward(dx, dw, db, doutputs, x, w, accumulate)
        assert_near(dx, exact(doutputs) @ exact(w), 2e-6)
        assert_near(dw, exact(doutputs).T @ exact(x) + 3 * accumulate, 2e-6)
        assert_near(db, doutputs.astype(float).sum(0) + 3 * accumulate, 2e-6)


def gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def test_gelu(k):
    x, w, b = random(70, 36).astype(bfloat16), random(100, 36) / 6, random(100)
    out, saved = (np.empty((70, 100), bfloat16) for _ in range(2))
    k.linear_gelu_forward(out, saved, x, w, b)
    z = exact(x) @ exact(w).T + b
    slope = (gelu(z + 1e-4) - gelu(z - 1e-4)) / 2e-4
    assert_near(out, gelu(z), STEP)
    assert_near(saved, slope, STEP)
    w2, dy = random(40, 100), random(70, 40)
    dx, dw = np.empty((70, 100), bfloat16), np.empty((40, 100), np.float32)
    k.gelu_linear_backward(dx, dw, dy, out, saved, w2, False)
    assert_near(dx, exact(dy) @ exact(w2) * exact(saved), STEP)
    assert_near(dw, exact(dy).T @ exact(out), 2e-6)


@pytest.mark.parametrize("T", [1, 13, 150])  # 150: more than one block of query rows
def test_attention(k, T):
    """Against the float32 kernels. Probabilities and their gradients are operands: rounded, too."""
    B, heads, width = 2, 3, 60
    qkv, dout = random(B, T, 3 * width).astype(bfloat16), random(B, T, width)
    results = []
    for kernels, dtype in ((load_kernels("numpy", 1), np.float32), (k, bfloat16)):
        out, dqkv = np.empty((B, T, width), dtype), np.empty(qkv.shape, dtype)
        lse = np.empty((B, heads, T), np.float32)
        kernels.attention_forward(out, lse, qkv.astype(dtype), heads)
        kernels.attention_backward(dqkv, dout, qkv.astype(dtype), out, lse, heads)
        results.append((out, dqkv))
    (expected, gradients), (out, dqkv) = results
    assert_near(out, expected, STEP)
    assert_near(dqkv, gradients, 2 * STEP)


@pytest.mark.parametrize("accumulate", [False, True])
def test_classifier(k, accumulate):
    N, C, V, padded = 70, 24, 1101, 1152
    x, wte, targets = random(N, C).astype(bfloat16), random(padded, C) / 4, np.arange(N) * 15
    losses, exponentials, scale = np.empty(N, np.float32), np.full((N, padded), 7, bfloat16), np.empty(N, np.float32)
    k.classifier_forward(losses, exponentials, scale, x, wte, targets, V, 0.25)
    logits = exact(x) @ exact(wte[:V]).T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(losses, -np.log(p[np.arange(N), targets]), rtol=1e-5)
    dx, dwte = np.empty((N, C), np.float32), np.full((padded, C), 3, np.float32)
    k.classifier_backward(dx, dwte, exponentials, scale, x, wte, accumulate)
    dlogits = 0.25 * (p - np.eye(V)[targets])
    assert_near(dx, dlogits @ exact(wte[:V]), STEP)
    assert_near(dwte[:V] - 3 * accumulate, dlogits.T @ exact(x), STEP)
    assert (dwte[V:] == 3 * accumulate).all()


CONFIG = GPT2Config(n_layer=2, n_head=3, n_embd=60, context=48, vocab_size=701)


def step(kernels, micro_steps=1):
    """(loss, gradients) of a batch of 3 windows of 41 tokens."""
    model = new_model(CONFIG, kernels, 3, 41)
    initialize(model.parameters, seed=1)
    x, y = np.random.default_rng(1).integers(CONFIG.vocab_size, size=(2, 3, 41), dtype=np.int32)
    for micro_step in range(micro_steps):
        loss = model.forward(x, y, 1 / x.size) / x.size
        model.backward(accumulate=micro_step > 0)
    return loss, model.gradients


def test_a_models_gradients_are_float32s_but_for_rounding(k):
    loss, gradients = step(k)
    expected_loss, expected = step(load_kernels("numpy", 1))
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert loss != expected_loss
    for tensor in gradients.layout.tensors:
        here = slice(tensor.start, tensor.stop)
        if not tensor.name.endswith("qkv_bias"):  # the key bias' true gradient is 0
            assert_near(gradients.flat[here], expected.flat[here].astype(float), 0.02)


def test_a_model_gives_the_same_bits_again(cores):
    first, second = (step(bind(numpy_kernels, cores), micro_steps=2) for _ in range(2))
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1].flat, second[1].flat)


def python(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


GUARDED = """if True:
    import ctypes, mmap
    import numpy as np
    from gpt2.kernels.numpy.bfloat16 import amx_bf16, bfloat16, {form} as form

    def guarded(array):
        "The same numbers, up to the last byte before a page that nobody may read."
        pages = -(-array.nbytes // mmap.PAGESIZE)
        memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
        copy = np.frombuffer(memory, array.dtype, array.size, pages * mmap.PAGESIZE - array.nbytes).reshape(array.shape)
        copy[...] = array
        return copy

    amx_bf16.available()  # asks for the registers
    cores, random = form(1), np.random.default_rng(0)
    for rows, columns, depth in (6, 16, 8), (11, 21, 10), (13, 39, 17), (7, 1, 31):
        for dtype in np.float32, bfloat16:
            a, b = (random.standard_normal(shape).astype(dtype) for shape in ((rows, depth), (depth, columns)))
            expected = a.astype(bfloat16).astype(float) @ b.astype(bfloat16).astype(float)
            for left in guarded(a), guarded(a.T.copy()).T:
                for right in guarded(b), guarded(b.T.copy()).T:
                    out = guarded(np.zeros((rows, columns), np.float32))
                    cores.matmuls((left, right, out, None))
                    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    print("read nothing else")
"""


@pytest.mark.parametrize("form", [form.__name__ for form in FORMS])
def test_nothing_is_touched_behind_an_array(form):
    assert python(GUARDED.format(form=form)) == "read nothing else\n"


AVX512 = "+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq"
PAIRS = f"{AVX512},+avx512bf16"
TILES = f"{PAIRS},+amx-tile,+amx-bf16"
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's instructions")


@pytest.mark.parametrize(
    ("features", "form"),
    [
        ("", WideningCores),
        pytest.param(AVX512, WideningCores, marks=X86),
        pytest.param(PAIRS, DotProductCores, marks=X86),
        pytest.param(TILES, TileCores if amx_bf16.available() else DotProductCores, marks=X86),
    ],
    ids=["any CPU", "AVX-512", "VDPBF16PS", "TDPBF16PS"],
)
def test_the_form_is_chosen_by_the_cpus_instructions(features, form):
    """numba is told to compile for a CPU that has just these. Linux grants AMX only on a CPU that has it."""
    code = "from gpt2.kernels import load_kernels; print(load_kernels('numpy', 1, dtype='bfloat16').device.how)"
    assert python(code, NUMBA_CPU_FEATURES=features).strip() == form.how


@X86
@pytest.mark.parametrize(
    ("module", "cpu", "features", "instructions"),
    [
        ("avx512_bf16", "znver4", PAIRS, ["vdpbf16ps", "vcvtne2ps2bf16", "zmm"]),
        ("amx_bf16", "sapphirerapids", TILES, ["tdpbf16ps", "tileloadd", "ldtilecfg", "vcvtne2ps2bf16"]),
    ],
    ids=["VDPBF16PS", "TDPBF16PS"],
)
def test_the_instructions_are_compiled_anywhere(tmp_path, module, cpu, features, instructions):
    """For a CPU that has them, by name: also where none is at hand to run them."""
    code = f"""if True:
        from numba import int64
        from gpt2.kernels.numpy import {module} as kernels
        from gpt2.kernels.numpy.bf16_products import pack_a, pack_b
        kernels.products.compile((int64,) * 23)
        assembly = "".join(kernels.products.inspect_asm().values())
        print(*(name in assembly for name in {instructions}), len(pack_a.signatures), len(pack_b.signatures))
    """
    environment = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    # One form of pack_a() and pack_b() each: compiling another would take a second.
    assert python(code, **environment).split() == ["True"] * len(instructions) + ["1", "1"]
