"""The CUDA kernels without a GPU: NVRTC compiles them, and a CPU runs them (cuda_shim) against the NumPy kernels."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.kernels.cupy import classifier, launch, libraries
from gpt2.kernels.cupy.compile import FOLDER, SOURCES, STORAGES, _cached_file, cached_code, compile_cubin
from gpt2.kernels.cupy.libraries import open_library
from gpt2.kernels.numpy import Cores
from tests.gpu.cuda_shim import cases
from tests.gpu.cuda_shim.memory import Memory
from tests.gpu.cuda_shim.shim import KERNEL, Shim, lasting_build
from tests.gpu.kernel_resources import parse_log

SEEDS = range(3)
MUTANT_SEEDS = range(10)
ALL_CASES = [
    pytest.param(name, sizes, id=f"{name}-{'-'.join(map(str, sizes))}")
    for name, _, some in cases.CASES
    for sizes in some
]
BARRIERS = [
    (path.name, number)
    for path in sorted(FOLDER.glob("*.cu*"))
    for number, line in enumerate(path.read_text().splitlines(), start=1)
    if "__syncthreads();" in line
]
STUCK = """
extern "C" __global__ void __launch_bounds__(32) stuck() {
    if (threadIdx.x == 0) __syncthreads();
    else __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
"""


@pytest.fixture(scope="session")
def cores():
    return Cores(1)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("name", "sizes"), ALL_CASES)
def test_numbers(shim, cores, name, sizes, storage):
    """As the NumPy kernels have it, and to the last bit the same in whatever order threads and blocks run."""
    first = None
    for shim.seed in SEEDS:
        outputs = [array.tobytes() for array in cases.run(shim, cores, name, storage, sizes)]
        first = first or outputs
        assert outputs == first


@pytest.mark.parametrize("storage", STORAGES)
def test_pad_columns_get_gradient_zero(shim, storage):
    memory = Memory(storage)
    logits, losses = memory.nans(2, 1003), memory.nans(2, dtype=np.float32)
    logits[:, :1000] = 0
    classifier.cross_entropy(shim, losses, logits, memory.put_exactly(np.array([0, 999], np.int32)), 1000, 1.0, True)
    assert not logits[:, 1000:].any()
    np.testing.assert_allclose(losses, np.log(1000), rtol=1e-6)


@pytest.mark.parametrize(("file_name", "line"), BARRIERS)
def test_a_missing_barrier_is_noticed(cores, file_name, line):
    """Every barrier there is: without it some order of the threads gives other numbers. So the shim can fail."""
    mutant = Shim(lasting_build())
    mutant.left_out = f"/{file_name}:{line}"
    users = ("sum_of_squares",) if file_name == "common.cuh" else (file_name.removesuffix(".cu"),)  # its block_sum
    concerned = [(name, sizes) for name, source, some in cases.CASES if source in users for sizes in some]
    for mutant.seed in MUTANT_SEEDS:
        for name, sizes in concerned:
            try:
                cases.run(mutant, cores, name, "bfloat16", sizes)
            except AssertionError:
                return
    pytest.fail(f"the barrier in line {line} of {file_name} can be left out and no number changes")


def test_the_shim_refuses(shim, tmp_path):
    """A misaligned 16-byte access; a block above the launch bounds; too little shared memory; a barrier not reached."""
    memory = Memory("float32")
    saved = memory.put(np.zeros(8), offset=1)
    with pytest.raises(RuntimeError, match="misaligned"):
        launch.gelu_backward(shim, saved, saved)
    with pytest.raises(RuntimeError, match="launch bounds"):
        shim.launch("gelu", "float32", "gelu_backward", (1,), (512,), ())
    row = memory.normal(8)
    arguments = (row, memory.nans(16), row, row, row, row, row, *launch.int32(1, 8, 2))
    with pytest.raises(RuntimeError, match="overrun"):
        shim.launch("layernorm", "float32", "layernorm_backward", (1,), (32,), arguments, shared_bytes=60)
    (tmp_path / "stuck.cu").write_text(STUCK)
    with pytest.raises(RuntimeError, match="deadlock"):
        Shim(tmp_path, tmp_path).launch("stuck", "float32", "stuck", (1,), (32,), ())


def test_too_wide_a_row_is_refused(shim):
    memory = Memory("float32")
    row, one = memory.nans(1, 20_000), memory.nans(1)
    with pytest.raises(UserError, match="too wide"):
        launch.layernorm_forward(shim, row, one, one, row, row[0], row[0])


def test_layernorms_backward_fills_the_gpu():
    """Of an H100, with and without column sums, what was measured as the fastest; of narrow and wide rows as many warps
    as registers and shared memory allow, and never more blocks than run at once."""
    h100 = SimpleNamespace(multiprocessors=132, multiprocessor_bytes=228 << 10)
    assert launch._lasting_blocks(h100, 2 * 4 * 768) == (4 * 132, 8, 49152)
    assert launch._lasting_blocks(h100, 3 * 4 * 768) == (3 * 132, 8, 73728)
    for row_bytes, expected in ((12, 32), (3 * 4 * 1280, 15), (3 * 4 * 1600, 12), (100_000, 2)):
        blocks, warps, shared_bytes = launch._lasting_blocks(h100, row_bytes)
        at_once = blocks // 132
        assert shared_bytes == warps * row_bytes
        assert at_once * (shared_bytes + 1024) <= 228 << 10
        assert at_once * warps == expected
    with pytest.raises(UserError, match="too wide"):
        launch._lasting_blocks(h100, 240_000)


ARCHITECTURES = {"float32": ("sm_90a",), "bfloat16": ("sm_80", "sm_90a")}


@pytest.fixture
def nvrtc():
    """Skips the test where NVRTC is not installed."""
    try:
        open_library("nvrtc")
    except UserError as missing:
        pytest.skip(str(missing))


def kept_cubin(source, storage, arch):
    """compile_cubin's code and log, found again as long as sources, options and compiler are the same."""
    code = _cached_file(source, storage, arch, lasting_build())
    log = code.with_suffix(".log")
    if not log.exists():
        machine_code, text = compile_cubin(source, storage, arch)
        code.write_bytes(machine_code)
        log.write_text(text)
    return code.read_bytes(), log.read_text()


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_spills(source, storage):
    """For both architectures at once; float32, which uses no tensor cores and takes long, for one."""
    with ThreadPoolExecutor() as pool:
        cubins = pool.map(partial(kept_cubin, source, storage), ARCHITECTURES[storage])
    for code, log in cubins:
        assert code.startswith(b"\x7fELF")
        resources = parse_log(log)
        kernels = KERNEL.findall((FOLDER / f"{source}.cu").read_text())
        assert set(resources) == {name for *_, name in kernels}
        for threads, blocks, name in kernels:
            registers, spilled = resources[name]
            assert spilled == 0, name
            assert registers * int(threads) * int(blocks or 1) <= 65536, name


@pytest.mark.usefixtures("nvrtc")
def test_a_compiler_error_shows_the_compilers_words():
    with pytest.raises(RuntimeError, match=r"gelu\.cu for float32, sm_1: .*(\n.*)*gpu-architecture"):
        compile_cubin("gelu", "float32", "sm_1")


@pytest.mark.usefixtures("nvrtc")
def test_machine_code_is_kept(tmp_path):
    """Compiled once for each storage and architecture; no part of a file is left."""
    first = cached_code("gelu", "float32", "sm_80", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"kept")
    assert first.startswith(b"\x7fELF")
    assert cached_code("gelu", "float32", "sm_80", tmp_path) == b"kept"
    assert cached_code("gelu", "bfloat16", "sm_80", tmp_path) != b"kept"
    assert len(list(tmp_path.iterdir())) == 2


def test_every_source_has_a_case():
    assert set(SOURCES) == {source for _, source, _ in cases.CASES}, "cases.py runs each .cu file"


def test_the_newest_cudas_wheels_are_taken(tmp_path, monkeypatch):
    """Of two versions side by side: CUDA 12's wheels have a folder for each library, CUDA 13's one for all."""
    files = ["cublas/lib/libcublasLt.so.12", "cu13/lib/libcublasLt.so.13", "cuda_runtime/include/cuda_bf16.h"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: spec)
    assert libraries.find_in_wheels("lib/libcublasLt.so.*") == tmp_path / files[1]
    assert libraries.header_folder() == (tmp_path / files[2]).parent
    assert libraries.find_in_wheels("lib/libnvrtc.so.*") is None
