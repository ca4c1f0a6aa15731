"""AdamW with bfloat16 parameters, on the CUDA kernel that runs on a CPU: their master copy, and its rounding."""

from itertools import pairwise

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.kernels import bind, load_kernels
from gpt2.kernels import cupy as cupy_kernels
from gpt2.kernels.cupy import launch
from gpt2.optimizer import AdamW, AdamWSettings
from gpt2.parameters import Layout
from gpt2.rounding import SPLITMIX64_STEP, RoundedParameters, splitmix64, step_seed
from tests.gpu.cuda_shim.memory import to_bfloat16, widen

RANDOM = np.random.default_rng(3)
SEED = 17
LAYOUT = Layout(GPT2Config(n_layer=1, n_head=1, n_embd=8, context=5, vocab_size=250))


@pytest.fixture
def kernels(shim):
    kernels = bind(cupy_kernels, shim)
    kernels.empty = lambda shape: np.zeros(shape, np.float32)
    return kernels


def rounded(shim, values, seed, step=1, first=0):
    """bfloat16 bits of float32 values, by a step that changes nothing: no gradient, no decay; and by the kernel that
    rounds and does nothing else: the same bits."""
    rounding_seed = None if seed is None else step_seed(seed, step)
    master, parameters = np.array(values, np.float32), np.zeros(len(values), np.uint16)
    zeros = [np.zeros(len(values), np.float32) for _ in range(3)]
    settings = (step, 1e-3, 0.9, 0.95, 1e-8, 0.0, 1.0)
    launch.adamw(shim, parameters, zeros[0], *zeros[1:], [], *settings, master, first, rounding_seed)
    np.testing.assert_array_equal(master, values)
    alone = np.zeros_like(parameters)
    launch.round_parameters(shim, alone, master, rounding_seed, first)
    np.testing.assert_array_equal(alone, parameters)
    return parameters


def all_kinds(count):
    """Finite float32 values of every exponent that is not denormal, and of both signs."""
    bits = RANDOM.integers(0x00800000, 0x7F7F0000, count, dtype=np.uint32)
    return (bits | RANDOM.integers(2, size=count, dtype=np.uint32) << 31).view(np.float32)


def test_to_nearest_as_before(shim):
    """Bit for bit what the conversion of whole arrays gives; ties among them."""
    values = all_kinds(50_000)
    values.view(np.uint32)[::3] &= 0xFFFF8000
    np.testing.assert_array_equal(rounded(shim, values, None), to_bfloat16(values))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np.testing.assert_array_equal(rounded(shim, values, None), values.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_the_random_numbers(shim):
    """splitmix64's (test_rounding_draws.py), in the place of the element among all parameters."""
    values = all_kinds(1000)
    states = (step_seed(SEED, 3) + n * SPLITMIX64_STEP for n in range(7, 1007))
    draws = np.array([splitmix64(state % 2**64) for state in states], np.uint64) >> np.uint64(48)
    expected = (values.view(np.uint32) + draws.astype(np.uint32)) >> 16
    np.testing.assert_array_equal(rounded(shim, values, SEED, step=3, first=7), expected)


def test_random_rounding_is_right_on_average(shim):
    """Every result is one of the two neighbours; the mean over many steps and elements is the value itself."""
    values = np.float32(1) + np.linspace(0, 2**-7, 33, dtype=np.float32)[:-1]
    steps, copies = 50, 400
    drawn = np.stack([widen(rounded(shim, np.repeat(values, copies), SEED, step)) for step in range(1, steps + 1)])
    assert set(np.unique(drawn)) == {1.0, 1 + 2**-7}
    up = (values - 1) * 2**7
    deviation = 2**-7 * np.sqrt(up * (1 - up) / (steps * copies))
    error = drawn.reshape(steps, -1, copies).mean((0, 2)) - values
    assert (np.abs(error) <= 4.5 * deviation).all()
    mean_by_step = drawn.mean(1) - values.mean()
    assert np.abs(mean_by_step).max() < 4.5 * np.sqrt((deviation**2).mean() * steps / len(values))
    mean_by_element = (drawn.mean(0) - np.repeat(values, copies)) / 2**-7
    assert np.abs(mean_by_element).max() < 5.5 * np.sqrt(0.25 / steps)


def test_neighbours_steps_and_seeds_draw_independently(shim):
    values = np.full(40_000, 1 + 2**-8, np.float32)
    places = (SEED, 1), (SEED, 2), (SEED + 1, 1), (SEED + 1, 3)
    draws = [rounded(shim, values, *place) & 1 for place in places]
    first = draws[0]
    for one, other in [(first[1:], first[:-1]), (first[4:], first[:-4]), *pairwise(draws)]:
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / np.sqrt(len(one))


@pytest.mark.parametrize("seed", [None, SEED])
def test_values_that_bfloat16_has_stay(shim, seed):
    """Zeros of both signs, infinities, the largest and the smallest; and what is not a number stays that."""
    exact = (np.arange(0x0080, 0x7F81, dtype=np.uint32) << 16).view(np.float32)
    exact = np.concatenate([exact, -exact, np.array([0.0, -0.0], np.float32)])
    np.testing.assert_array_equal(rounded(shim, exact, seed), exact.view(np.uint32) >> 16)
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(widen(rounded(shim, np.resize(nans, 7), seed))).all()


class Bfloat16(np.ndarray):
    """Bits, with the one conversion that AdamW asks for."""

    def astype(self, dtype):
        return widen(np.asarray(self)).astype(dtype)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("cuts", [[], [1000], [17, 1000, 1003, 2500]])
def test_sharded_as_whole(kernels, stochastic, cuts):
    """The same bits in whatever ranges, at odd places among them, the parameters are updated."""
    settings = AdamWSettings(rounding_seed=SEED if stochastic else None)
    random = np.random.default_rng(8)
    whole = to_bfloat16(random.standard_normal(LAYOUT.size))
    sharded = whole.copy()
    edges = [0, *cuts, LAYOUT.size]
    optimizers = [AdamW(kernels, LAYOUT, *pair, settings) for pair in pairwise(edges)]
    reference = AdamW(kernels, LAYOUT, 0, LAYOUT.size, settings)
    for _ in range(3):
        gradients = to_bfloat16(random.standard_normal(LAYOUT.size))
        reference.update(whole.view(Bfloat16), gradients, 1e-2, 0.5)
        for optimizer, (start, stop) in zip(optimizers, pairwise(edges), strict=True):
            optimizer.update(sharded[start:stop].view(Bfloat16), gradients[start:stop], 1e-2, 0.5)
    np.testing.assert_array_equal(sharded, whole)
    np.testing.assert_array_equal(np.concatenate([optimizer.master for optimizer in optimizers]), reference.master)
    assert (whole == to_bfloat16(reference.master)).all() != stochastic


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("cuts", [[], [17, 1000, 1003, 2500]])
def test_updated_and_received_parameters_are_rounded_alike(shim, kernels, stochastic, cuts):
    """Float32 parameters of three ranks: each updates its own part, in the launch that also rounds it, and rounds what
    it gets of the others. All have the same bits, also where a step is skipped, and those of one that updates all."""
    settings = AdamWSettings()
    random = np.random.default_rng(8)
    values, edges = random.standard_normal(LAYOUT.size).astype(np.float32), [0, *cuts, LAYOUT.size]

    def new_rounded(step=0):
        flat = np.zeros(LAYOUT.size, np.uint16)
        return RoundedParameters(flat, kernels_round, SEED if stochastic else None, step)

    def kernels_round(*arguments):
        launch.round_parameters(shim, *arguments)

    ranks = [new_rounded() for _ in edges[1:]]
    optimizers = [AdamW(kernels, LAYOUT, *pair, settings, r) for pair, r in zip(pairwise(edges), ranks, strict=True)]
    for step, scale in ((1, 0.5), (2, None), (3, 0.5)):
        gradients = random.standard_normal(LAYOUT.size).astype(np.float32)
        for rounded, optimizer, (start, stop) in zip(ranks, optimizers, pairwise(edges), strict=True):
            rounded.begin_update()
            optimizer.update(values[start:stop], gradients[start:stop], 1e-2, scale)
            received = 0 if scale else stop - start
            assert sum(high - low for low, high in rounded.missing(start, stop)) == received
        expected = new_rounded(step)
        expected.store(0, values)
        for rounded in ranks:
            for start, stop in rounded.missing(0, LAYOUT.size):
                rounded.store(start, values[start:stop])
            np.testing.assert_array_equal(rounded.flat, expected.flat)
        assert (expected.flat == to_bfloat16(values)).all() != stochastic


def test_small_steps_add_up_in_the_master_copy(kernels):
    """Though each is far below half a unit in the last place of the parameters."""
    optimizer = AdamW(kernels, LAYOUT, 1000, 2000, AdamWSettings(weight_decay=0.0))
    parameters = to_bfloat16(np.ones(1000)).view(Bfloat16)
    for _ in range(20):
        optimizer.update(parameters, np.ones(1000, np.float32), 1e-3, 1.0)
    np.testing.assert_allclose(optimizer.master, 0.98, rtol=1e-4)
    np.testing.assert_array_equal(parameters, to_bfloat16(optimizer.master))


def test_the_numpy_kernels_refuse_a_master_copy():
    one = np.ones(1, np.float32)
    with pytest.raises(AssertionError, match="no bfloat16"):
        load_kernels("numpy", 1).adamw(one, one, one, one, [], 1, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, master=one)
