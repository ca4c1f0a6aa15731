"""Exchanges between GPUs that are none: sums, parts and bits of each, over each transport, on nodes of every size."""

import numpy as np
import pytest
from cuda_shim import fake_cupy
from cuda_shim.fake_cublaslt import FakeCublasLt
from cuda_shim.memory import to_bfloat16, widen
from gpu_trainer import on_nodes

from dist.device_calls import DeviceCalls
from dist.device_ring import DeviceRing
from dist.exchanges import Rings
from dist.gpu_aware import GpuAwareComm
from dist.nccl import NcclComm
from dist.node_exchange import NodeExchange
from gpt2.cupy_kernels import cublaslt
from gpt2.cupy_kernels.device import Device

pytestmark = pytest.mark.any_mpi
TRANSPORTS = {"nccl": NcclComm, "gpu-aware": GpuAwareComm}
EXCHANGES = (
    (DeviceCalls, "float32"), (DeviceRing, "float32"), (DeviceRing, "bfloat16"),
    (NodeExchange, "float32"), (NodeExchange, "bfloat16"),
)  # fmt: skip
LENGTHS = (101, 32, 2)  # the last is less than there are ranks
JUNK = -7.0


@pytest.fixture
def new_comm(comm, monkeypatch):
    """new_comm(transport, world) makes its DeviceComm on a new GPU; all work is late, on a stream beside with NCCL."""
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())

    def make(transport, world):
        fake_cupy.install(monkeypatch, None, nccl=True, lag="everything")
        device = Device()
        stream = device.cupy.cuda.Stream(non_blocking=True) if transport == "nccl" else device.stream
        return TRANSPORTS[transport](world.comm, device, stream, world.local_comm)

    return make


def cases(comm, new_comm):
    """(exchange, its communicator, wire, what to say of it) for vectors of the longest length."""
    for per_node in sorted({1, 2, comm.size}):
        world = on_nodes(comm, per_node)
        for transport in TRANSPORTS:
            for kind, wire in EXCHANGES:
                device_comm = new_comm(transport, world)
                exchange = kind(device_comm, [(0, LENGTHS[0])], wire, None)
                yield exchange, device_comm, wire, f"{kind.__name__} {wire} {transport}, {per_node} a node"


def run(device_comm, progress, exchange, values) -> np.ndarray:
    """What an exchange makes of them, `exchange` being a method of one."""
    flat = device_comm.device.empty((len(values),), np.float32)
    flat.set(values)
    progress.finish(progress.start(exchange(flat)))
    return device_comm.device.download(flat)


def rank_values(rank, length):
    return np.random.default_rng([rank, length]).standard_normal(length).astype(np.float32)


def rounded(values):
    return widen(to_bfloat16(values)).astype(np.float32)


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_get_the_same_sum(comm, new_comm):
    for exchange, device_comm, wire, case in cases(comm, new_comm):
        for length in LENGTHS:
            own = rank_values(comm.rank, length)
            total = sum(rank_values(rank, length).astype(float) for rank in range(comm.size))
            found = run(device_comm, exchange.progress, exchange.allreduce, own)
            tolerance = 1e-6 if wire == "float32" else 2e-2
            np.testing.assert_allclose(found, total, atol=tolerance * np.abs(total).max(), err_msg=case)
            assert len(set(comm.allgather(found.tobytes()))) == 1, case
            again = run(device_comm, exchange.progress, exchange.allreduce, own)
            np.testing.assert_array_equal(again, found, err_msg=case)


@pytest.mark.ranks(1, 2, 3)
def test_the_ring_has_the_bits_of_the_ring_in_host_memory(comm, new_comm):
    for exchange, device_comm, wire, case in cases(comm, new_comm):
        if not isinstance(exchange, DeviceRing):
            continue
        for length in LENGTHS:
            on_host, expected = Rings(comm, [(0, length)], wire, 16), rank_values(comm.rank, length)
            on_host.progress.start(on_host.allreduce(expected))
            on_host.progress.finish()
            found = run(device_comm, exchange.progress, exchange.allreduce, rank_values(comm.rank, length))
            np.testing.assert_array_equal(found, expected, err_msg=case)


@pytest.mark.ranks(1, 2, 3)
def test_a_sum_comes_in_parts_and_parts_come_together(comm, new_comm):
    """The ranks' own parts tile the vector. What is gathered comes rounded, unless nothing goes between nodes."""
    for exchange, device_comm, wire, case in cases(comm, new_comm):
        for length in LENGTHS:
            own = slice(*exchange.own_part(0, length))
            tiles = np.sort(np.concatenate(comm.allgather(np.arange(length)[own])))
            np.testing.assert_array_equal(tiles, np.arange(length), err_msg=case)
            total = sum(rank_values(rank, length).astype(float) for rank in range(comm.size))
            part = run(device_comm, exchange.progress, exchange.reduce_scatter, rank_values(comm.rank, length))[own]
            tolerance = 1e-6 if wire == "float32" else 2e-2
            np.testing.assert_allclose(part, total[own], atol=tolerance * np.abs(total).max(), err_msg=case)
            values, filled = rank_values(9, length), np.full(length, JUNK, np.float32)
            filled[own] = values[own]
            found = run(device_comm, exchange.progress, exchange.all_gather, filled)
            one_node = isinstance(exchange, NodeExchange) and case.endswith(f", {comm.size} a node")
            is_rounded = wire == "bfloat16" and comm.size > 1 and not one_node
            np.testing.assert_array_equal(found, rounded(values) if is_rounded else values, err_msg=case)


@pytest.mark.ranks(2)
def test_the_fake_nccl_refuses_what_would_hang(comm, new_comm):
    """A receive that nobody sends to, and messages outside of a group: on real GPUs nothing would ever come of them."""
    device_comm = new_comm("nccl", on_nodes(comm, 2))
    send, receive = (device_comm.device.empty((4,), np.float32) for _ in range(2))
    device_comm.Sendrecv(send, 0, recvbuf=receive, source=0)
    with pytest.raises(AssertionError, match="expected"):
        device_comm.stream.synchronize()
    with pytest.raises(AssertionError, match="outside of a group"):
        device_comm._communicator.send(send.data.ptr, 4, 7, 1 - comm.rank, device_comm.stream.ptr)
    with pytest.raises(TypeError, match="expected contiguous float32 or uint16"):
        device_comm.Sendrecv(send[::2], 0, recvbuf=receive, source=0)
