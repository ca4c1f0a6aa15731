"""Matrix products by cuBLASLt without a GPU: recipes against a Python cuBLASLt, descriptors in the real one."""

import ctypes
import gc

import numpy as np
import pytest

from gpt2.config import PRESETS
from gpt2.errors import UserError
from gpt2.kernels.cupy import cublaslt
from gpt2.kernels.cupy.cublaslt import CublasLt
from gpt2.kernels.cupy.matmul import Matmul, MatmulPlan, Operand, Recipe, make_recipe, name_of
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt, gelu, gelu_slope
from tests.gpu.cuda_shim.fake_cupy import ndarray
from tests.gpu.cuda_shim.memory import to_bfloat16, widen

RANDOM = np.random.default_rng(9)
M, N, K = 24, 40, 16
TOLERANCES = {"float32": 1e-5, "bfloat16": 2**-7}


def array(values, storage):
    values = np.asarray(values, np.float32)
    return (to_bfloat16(values) if storage == "bfloat16" else values).view(ndarray)


def normal(storage, *shape):
    return array(RANDOM.standard_normal(shape), storage)


@pytest.fixture
def fake():
    return FakeCublasLt()


@pytest.fixture
def matmul(fake):
    """The middle one of the three candidates is the fastest."""
    times = iter([3.0, 1.0, 2.0] * 9)

    def time_ms(run):
        run()
        return next(times)

    def scratch(name, shape, dtype):
        return np.zeros(shape, dtype).view(ndarray)

    return Matmul(CublasLt(fake), 7, np.zeros(64, np.uint8).view(ndarray), scratch, time_ms, tf32=False)


def assert_close(got, expected, storage):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(widen(np.asarray(got)), expected, atol=TOLERANCES[storage] * scale)


@pytest.mark.parametrize("storage", TOLERANCES)
@pytest.mark.parametrize("transposed", ["neither", "left", "right"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products(matmul, storage, transposed, accumulate):
    left = normal(storage, K, M).T if transposed == "left" else normal(storage, M, K)
    right = normal(storage, N, K).T if transposed == "right" else normal(storage, K, N)
    out = normal(storage, M, N)
    expected = widen(left) @ widen(right) + (widen(out) if accumulate else 0.0)
    matmul(out, left, right, accumulate=accumulate)
    assert_close(out, expected, storage)


@pytest.mark.parametrize("storage", TOLERANCES)
def test_epilogues(matmul, storage):
    left, right, out, aux = normal(storage, M, K), normal(storage, N, K), normal(storage, M, N), normal(storage, M, N)
    bias, product = normal(storage, N), widen(left) @ widen(right).T
    matmul(out, left, right.T, bias=bias)
    assert_close(out, product + widen(bias), storage)
    matmul(out, left, right.T, bias=bias, gelu_input=aux)
    assert_close(out, gelu(product + widen(bias)), storage)
    assert_close(aux, product + widen(bias), storage)
    matmul(out, left, right.T, dgelu_input=aux)
    assert_close(out, product * gelu_slope(widen(aux)), storage)
    sums = normal(storage, M)
    matmul(out, left, right.T, left_sums=sums)
    assert_close(sums, widen(left).sum(1), storage)
    assert_close(out, product, storage)


def test_the_fastest_candidate_is_chosen_once(matmul, fake):
    """And new pointers of an epilogue are used from call to call."""
    left, right, out = normal("float32", M, K), normal("float32", K, N), normal("float32", M, N)
    for bias in (normal("float32", N), normal("float32", N)):
        matmul(out, left, right, bias=bias)
        assert_close(out, left @ right + bias, "float32")
    assert fake.runs == [0, 1, 2, 1, 1]
    (plan,) = matmul.plans.values()
    assert plan.times_ms == [3.0, 1.0, 2.0]


def test_a_candidate_that_is_refused_is_passed_over(matmul, fake):
    """The fastest by the clock never runs, as cuBLASLt refuses it."""
    fake.refused = 1
    left, right, out = normal("float32", M, K), normal("float32", K, N), normal("float32", M, N)
    matmul(out, left, right)
    assert_close(out, left @ right, "float32")
    (plan,) = matmul.plans.values()
    assert plan.times_ms == [3.0, np.inf, 1.0]
    assert plan.algorithm.algorithm[0] == 2


def test_a_given_algorithm_is_taken_and_nothing_timed(matmul, fake):
    """By another process, whose clock found the last one fastest; it also takes the place of what is chosen by now."""
    left, right, out = normal("float32", M, K), normal("float32", K, N), normal("float32", M, N)
    matmul(out, left, right)
    (name,) = matmul.algorithms
    assert matmul.algorithms[name][0] == 1
    fake.runs.clear()
    matmul.give({name: bytes([2] + 63 * [0])})
    matmul(out, left, right)
    expected = left @ right
    assert_close(out, expected, "float32")
    matmul(out, left, right, accumulate=True)
    assert_close(out, 2 * expected, "float32")
    assert (set(fake.runs), fake.heuristics) == ({2}, 1)
    matmul.plans.clear()
    matmul(out, left, right, accumulate=True)
    assert_close(out, 3 * expected, "float32")
    assert (set(fake.runs), fake.heuristics) == ({2}, 1)


def test_a_given_algorithm_that_is_refused_is_timed_anew(matmul, fake):
    left, right, out = normal("float32", M, K), normal("float32", K, N), normal("float32", M, N)
    name = name_of(make_recipe(out, left, right, "none"), tf32=False)
    matmul.give({name: bytes([7] + 63 * [0])})
    fake.refused = 7
    matmul(out, left, right)
    assert_close(out, left @ right, "float32")
    assert fake.heuristics == 1
    assert matmul.algorithms[name][0] == 1


def test_every_recipe_has_a_name_of_its_own():
    recipes = [(recipe, tf32) for recipe in set(preset_recipes()) for tf32 in (False, True)]
    names = {name_of(recipe, tf32) for recipe, tf32 in recipes}
    assert len(names) == sum(not tf32 or recipe.storage == "float32" for recipe, tf32 in recipes)


def test_what_cublaslt_cannot_do_is_said(fake, matmul):
    fake.unsupported = (cublaslt.EPILOGUES["dgelu"],)
    left, right, out = normal("float32", M, K), normal("float32", K, N), normal("float32", M, N)
    with pytest.raises(RuntimeError, match=r"no algorithm for Recipe.*dgelu"):
        matmul(out, left, right, dgelu_input=out)
    with pytest.raises(ValueError, match="does not make"):
        matmul(out, left, left)


def test_descriptors_are_destroyed(fake, matmul):
    matmul(normal("float32", M, N), normal("float32", M, K), normal("float32", K, N))
    assert len(fake.objects) == 6, "a handle, a descriptor, three layouts, a preference"
    matmul.plans.clear()
    gc.collect()
    assert len(fake.objects) == 1


def test_a_recipe_knows_how_its_arrays_are_aligned():
    memory = np.zeros(4 * M * K + 8, np.float32).view(ndarray)
    first = (-memory.ctypes.data % 64) // 4
    left, right = memory[first : first + M * K].reshape(M, K), memory[first + 4 : first + 4 + K * K].reshape(K, K)
    recipe = make_recipe(np.zeros((M, K), np.float32).view(ndarray), left, right, "none")
    assert recipe.alignments[0] == 16
    assert recipe.alignments[1] >= 64


def preset_recipes():
    """Every product of every preset's step, forward and backward, with each epilogue it may have."""
    for config in PRESETS.values():
        C, Vp, rows = config.n_embd, config.padded_vocab_size, 4 * config.context
        for inputs, outputs in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C), (C, Vp)):
            weight = Operand(inputs, outputs, inputs)
            x, y = Operand(inputs, rows, inputs), Operand(outputs, rows, outputs)
            turned = Operand(inputs, outputs, inputs, transposed=True)
            for storage in ("float32", "bfloat16"):
                for epilogue in ("none", "bias", "gelu_aux_bias"):
                    yield Recipe(turned, x, y, storage, epilogue, (256, 256, 256, 256))
                for epilogue in ("none", "dgelu"):
                    yield Recipe(weight, y, x, storage, epilogue, (16, 256, 256, 256))
                for epilogue in ("none", "bgradb"):
                    dout = Operand(outputs, rows, outputs, transposed=True)
                    yield Recipe(x, dout, weight, storage, epilogue, (256, 256, 128, 128))


@pytest.fixture(scope="module")
def library():
    try:
        return CublasLt()
    except (UserError, OSError) as missing:
        pytest.skip(f"cuBLASLt is not installed (nvidia-cublas, 423 MB): {missing}")


@pytest.mark.parametrize("tf32", [False, True])
def test_the_real_library_takes_every_descriptor(library, tf32):
    """Built, and read back, for every product of every preset; without a driver, as no function here needs one."""
    read = library._library.cublasLtMatmulDescGetAttribute
    read.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    for recipe in preset_recipes():
        plan = MatmulPlan(library, recipe, tf32, 32 << 20)
        plan.set_pointers(bias=1 << 40, aux=1 << 41)
        expected = {
            cublaslt.EPILOGUE: (ctypes.c_uint32, cublaslt.EPILOGUES[recipe.epilogue]),
            cublaslt.TRANSPOSE_A: (ctypes.c_int32, recipe.a.transposed),
            cublaslt.TRANSPOSE_B: (ctypes.c_int32, recipe.b.transposed),
            cublaslt.BIAS_POINTER: (ctypes.c_uint64, 1 << 40),
            cublaslt.AUX_POINTER: (ctypes.c_uint64, 1 << 41),
            0: (ctypes.c_int32, 77 if tf32 and recipe.storage == "float32" else 68),
        }
        for attribute, (kind, value) in expected.items():
            got, size = kind(), ctypes.c_size_t()
            assert (
                read(plan.descriptor.pointer, attribute, ctypes.byref(got), ctypes.sizeof(got), ctypes.byref(size)) == 0
            )
            assert (got.value, size.value) == (value, ctypes.sizeof(kind)), (recipe, attribute)


def test_the_heuristic_results_layout():
    """As the header has it: 96 bytes, the workspace's size after the algorithm's 64."""
    assert ctypes.sizeof(cublaslt.HeuristicResult) == 96
    assert cublaslt.HeuristicResult.workspace_bytes.offset == 64
    assert cublaslt.HeuristicResult.state.offset == 72
