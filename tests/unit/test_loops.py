"""The compiled loops themselves: their exponential, the same bits however an array is cut, and compiling anywhere."""

import itertools
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from gpt2.kernels import load_kernels
from gpt2.kernels.numpy import loops

RANDOM = np.random.default_rng(7)


def test_adamw_in_pieces_gives_the_same_bits():
    """A rank that updates a shard of the parameters gets what one that updates all of them gets."""
    k = load_kernels("numpy", 2)
    size, cuts = 1003, [0, 1, 130, 777, 1003]
    arrays = [RANDOM.standard_normal(size, dtype=np.float32) for _ in range(3)]
    arrays.append(np.square(RANDOM.standard_normal(size, dtype=np.float32)))
    pieces = [array.copy() for array in arrays]
    k.adamw(*arrays, [(0, size)], 3, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.7)
    for start, stop in itertools.pairwise(cuts):
        some = [array[start:stop] for array in pieces]
        k.adamw(*some, [(0, stop - start)], 3, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.7)
    for whole, piece in zip(arrays, pieces, strict=True):
        np.testing.assert_array_equal(whole, piece)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponential(dtype):
    x = np.linspace(-87.3, 80, 100_001, dtype=dtype)[None]
    out, sums = np.empty_like(x), np.zeros(1, dtype)
    loops.add_exponentials(out, 0, sums, x, np.zeros(1, dtype))
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=np.finfo(dtype).eps)
    assert sums[0] == pytest.approx(out.sum(dtype=np.float64), rel=1e-5)
    far_out = np.array([[-np.inf, -1e30, -120.0, 1e30, np.inf, np.nan]], dtype)
    out = np.full((1, 8), 7.0, dtype)
    loops.add_exponentials(out, 1, sums, far_out, np.zeros(1, dtype))
    np.testing.assert_allclose(out, [[7, 0, 0, 0, np.inf, np.inf, np.nan, 7]], atol=1e-50)


def test_loops_compile_where_no_folder_takes_the_cache(tmp_path):
    """A read-only installation, used by someone without a home folder."""
    shutil.copy(loops.__file__, tmp_path / "loops.py")
    (tmp_path / "__pycache__").write_text("no folder")
    code = "import loops, numpy; a = numpy.ones(3); loops.adamw(a, a, a, a, *numpy.ones(6)); print(a[0])"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }
    result = subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=tmp_path,
        env=environment | {"HOME": os.devnull},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
