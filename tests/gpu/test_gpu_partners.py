"""What ranks of one model exchange between GPUs that are none: sums over parts, and what stages pass on."""

from contextlib import ExitStack, closing, nullcontext
from itertools import product

import numpy as np
import pytest

from dist.gpu import staging
from dist.gpu.gpu_aware import GpuAwareComm
from dist.gpu.links import LinksThroughHost
from dist.gpu.nccl import NcclComm
from dist.gpu.shard_sums import StreamSums, SumsThroughHost
from dist.gpu.staging import HostStaging
from dist.mesh import make_mesh
from dist.shard_sums import SMALL, new_shard_sums
from dist.stage_links import DOWN, UP
from gpt2.kernels.cupy import cublaslt
from gpt2.kernels.cupy.device import Device
from tests.gpu.cuda_shim import fake_cupy
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.cuda_shim.fake_cupy import BFLOAT16
from tests.gpu.cuda_shim.memory import to_bfloat16, widen
from tests.gpu.gpu_trainer import on_nodes

pytestmark = pytest.mark.any_mpi
ROWS = (5, SMALL // 4)  # no share of it is as long as another
COMMS = {"nccl": NcclComm, "gpu-aware": GpuAwareComm}
WAYS = ("nccl", "gpu-aware", "a node's memory", "messages")
DTYPES = {"float32": (np.float32, 1e-6), "bfloat16": (BFLOAT16, 2**-8)}


def phase(name, bytes=0, root=None):
    return nullcontext()


@pytest.fixture
def new_device(monkeypatch):
    """new_device(): a GPU on which all work is late, or that of some streams; rows are copied in several chunks."""
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
    monkeypatch.setattr(staging, "CHUNK", 9000)

    def make(lag="everything"):
        fake_cupy.install(monkeypatch, None, nccl=True, lag=lag)
        return Device()

    return make


@pytest.fixture
def resources():
    """Closed after the test, the last first."""
    with ExitStack() as stack:
        yield stack


def parts_by(way, comm, device, dtype, resources):
    if way in COMMS:
        return StreamSums(COMMS[way](comm, device, device.stream), np.prod(ROWS), dtype, phase)
    world = on_nodes(comm, comm.size if way == "a node's memory" else 1)
    parts = resources.enter_context(closing(new_shard_sums(world, int(np.prod(ROWS)), phase)))
    return SumsThroughHost(parts, resources.enter_context(closing(HostStaging(device))), phase)


def values_of(rank, shape, dtype):
    """Of one rank, what its arrays of that dtype can hold."""
    values = np.random.default_rng([rank, *shape]).standard_normal(shape).astype(np.float32)
    return values if dtype == np.float32 else widen(to_bfloat16(values)).astype(np.float32)


def on_gpu(device, values, dtype):
    """An array that is filled by work on the stream, which is late."""
    source, array = device.empty(values.shape, np.float32), device.empty(values.shape, dtype)
    source.set(values)
    array[:] = source
    return array


def downloaded(device, array):
    return widen(device.download(array)).astype(np.float32)


def check(comm, device, found, expected, tolerance, case):
    """All ranks have the same bits, and they are what is expected."""
    content = downloaded(device, found)
    assert len(set(comm.allgather(content.tobytes()))) == 1, case
    np.testing.assert_allclose(content, expected, rtol=tolerance, atol=tolerance, err_msg=case)


@pytest.mark.ranks(2, 3)
def test_parts_have_one_sum(comm, new_device, resources):
    """Three times one after the other, so that what one call leaves behind is there in the next."""
    for way in WAYS:
        for name, (dtype, tolerance) in DTYPES.items():
            device, case = new_device(), f"{way} {name}"
            parts = parts_by(way, comm, device, dtype, resources)
            assert parts.room(ROWS) is None
            for shape in (ROWS, (3, 7), (SMALL + 5,), ROWS):
                everyone = [values_of(rank, shape, dtype) for rank in range(comm.size)]
                rows = on_gpu(device, everyone[comm.rank], dtype)
                check(comm, device, parts.sum(rows), np.sum(everyone, axis=0), 2 * tolerance, case)
            everyone = [values_of(rank, (11,), np.float32) for rank in range(comm.size)]
            rows = on_gpu(device, everyone[comm.rank], np.float32)
            check(comm, device, parts.maximum(rows), np.max(everyone, axis=0), 0, case)


@pytest.mark.ranks(2, 3)
def test_parts_lend_and_join(comm, new_device, resources):
    for way in WAYS:
        for name, (dtype, _) in DTYPES.items():
            device, case = new_device(), f"{way} {name}"
            parts = parts_by(way, comm, device, dtype, resources)
            lent = {
                (turn, n): on_gpu(device, values_of(10 * turn + comm.rank, (n,), dtype), dtype)
                for turn in range(2)
                for n in (7, 300)
            }
            for turn in range(2):
                parts.broadcast([array for (other, _), array in lent.items() if other == turn])
            whole, rows = values_of(5, ROWS, dtype), np.full(ROWS, np.nan, np.float32)
            own = slice(*parts.share(rows.size))
            rows.reshape(-1)[own] = whole.reshape(-1)[own]
            check(comm, device, parts.join(on_gpu(device, rows, dtype)), whole, 0, case)
            for (turn, n), array in lent.items():
                check(comm, device, array, values_of(10 * turn, (n,), dtype), 0, case)


def passed(links, comm, device, dtype, micro_steps, parts=None):
    """Each stage adds 1 to what it gets and passes it on, down and then up: what the first has in the end."""
    links.begin(micro_steps, micro_steps)
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    contents = [np.full(ROWS, 10.0 * number, np.float32) for number in range(micro_steps)]
    for direction, begins, ends in ((DOWN, first, last), (UP, last, first)):
        if not begins:
            landings = [on_gpu(device, np.full(ROWS, -1.0, np.float32), dtype) for _ in range(micro_steps)]
            for landing in landings:
                links.receive(direction, landing)
            contents = [downloaded(device, landing) for landing in landings]
        contents = [content + 1 for content in contents]
        for content in [] if ends else contents:
            rows = on_gpu(device, content, dtype)
            links.send(direction, rows)
            rows[:] = 0.0  # the caller's are free
    return contents


@pytest.mark.ranks(2, 3)
def test_stages_pass_rows_on(comm, new_device, resources):
    """And the head, there and back, twice; whether copies are late or what is computed."""
    world = on_nodes(comm, comm.size)
    for (name, (dtype, _)), lag in product(DTYPES.items(), ("everything", "first stream")):
        device = new_device(lag)
        links = LinksThroughHost(world, ROWS, phase, resources.enter_context(closing(HostStaging(device))))
        for turn in range(2):
            found = passed(links, comm, device, dtype, 3)
            if comm.rank == 0:
                for number, rows in enumerate(found):
                    np.testing.assert_array_equal(rows, 10 * number + 2 * comm.size, err_msg=name)
            head = values_of(turn, (9, 4), dtype)
            if comm.rank == 0:
                back = device.empty((9, 4), dtype)
                links.send_head(on_gpu(device, head, dtype))
                links.receive_head(back)
                links.wait_for_head()
                np.testing.assert_array_equal(downloaded(device, back), 2 * head, err_msg=name)
            elif comm.rank == comm.size - 1:
                borrowed = device.empty((9, 4), dtype)
                links.receive_head(borrowed)
                links.wait_for_head()
                links.send_head(on_gpu(device, 2 * downloaded(device, borrowed), dtype))
            links.finish()


@pytest.mark.ranks(4)
def test_each_part_sends_its_share(comm, new_device, resources):
    """Two stages of two parts, whichever way the parts speak."""
    mesh = make_mesh(on_nodes(comm, 4), 2, 2)
    for way in WAYS[:3]:
        device = new_device()
        parts = parts_by(way, mesh.shards_world.comm, device, np.float32, resources)
        links = LinksThroughHost(
            mesh.stages_world, ROWS, phase, resources.enter_context(closing(HostStaging(device))), parts
        )
        assert links._sent.size < np.prod(ROWS) * 0.51, "each sends half"
        found = passed(links, mesh.stages_world.comm, device, np.float32, 2)
        if mesh.stage == 0:
            for number, rows in enumerate(found):
                np.testing.assert_array_equal(rows, 10 * number + 4, err_msg=way)
        links.finish()
