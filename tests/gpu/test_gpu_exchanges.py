"""Exchanges between GPUs that are none: sums, parts and bits of each, over each transport, on nodes of every size."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from dist.gpu import device_tree
from dist.gpu.collectives import AllreduceCall, DeviceCollectives
from dist.gpu.device_ring import DeviceRing
from dist.gpu.device_tree import DeviceTree
from dist.gpu.exchange import StreamEngine
from dist.gpu.gpu_aware import GpuAwareComm
from dist.gpu.nccl import NcclComm
from dist.gpu.node_exchange import NodeExchange
from dist.host import host_tree
from dist.host.host_ring import allreduce as ring_allreduce
from dist.progress_engine import ProgressEngine
from dist.wire import WireFormat
from gpt2.kernels.cupy import cublaslt
from gpt2.kernels.cupy.device import Device
from tests.gpu.cuda_shim import fake_cupy, fake_nccl
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.cuda_shim.memory import to_bfloat16, widen
from tests.gpu.gpu_trainer import on_nodes

pytestmark = pytest.mark.any_mpi
TRANSPORTS = {"nccl": NcclComm, "gpu-aware": GpuAwareComm}
OF_BOTH_KINDS = (
    (DeviceRing, "float32"), (DeviceRing, "bfloat16"), (NodeExchange, "float32"), (NodeExchange, "bfloat16"),
)  # fmt: skip
TREES = (DeviceTree, "float32"), (DeviceTree, "bfloat16")
ALLREDUCES = ((AllreduceCall, "float32"), *TREES, *OF_BOTH_KINDS)
IN_PARTS = ((DeviceCollectives, "float32"), *OF_BOTH_KINDS)
LENGTHS = (101, 32, 2)  # the last is less than there are ranks
PIECE_BYTES = 40  # of the trees: more pieces than levels, not all as long
JUNK = -7.0


@pytest.fixture
def new_comm(comm, monkeypatch):
    """new_comm(transport, world) makes its DeviceComm on a new GPU; all work is late, on a stream beside with NCCL."""
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
    monkeypatch.setattr(device_tree, "PIECE_BYTES", PIECE_BYTES)

    def make(transport, world):
        fake_cupy.install(monkeypatch, None, nccl=True, lag="everything")
        device = Device()
        stream = device.cupy.cuda.Stream(non_blocking=True) if transport == "nccl" else device.stream
        return TRANSPORTS[transport](world.comm, device, stream, world.local_comm)

    return make


def cases(comm, new_comm, exchanges):
    """(exchange, its communicator, wire, what to say of it) for vectors of the longest length."""
    for per_node in sorted({1, 2, comm.size}):
        world = on_nodes(comm, per_node)
        for transport in TRANSPORTS:
            for kind, wire in exchanges:
                if per_node == 1 or kind is NodeExchange:  # to the others nodes are all the same
                    device_comm = new_comm(transport, world)
                    exchange = kind(device_comm, [(0, LENGTHS[0])], WireFormat(wire))
                    yield exchange, device_comm, wire, f"{kind.__name__} {wire} {transport}, {per_node} a node"


def run(device_comm, exchange, values, *errors) -> np.ndarray:
    """What an exchange makes of them, `exchange` being a method of one."""
    flat = device_comm.device.empty((len(values),), np.float32)
    flat.set(values)

    def queued():
        yield exchange(flat, *errors)

    progress = StreamEngine(device_comm.device, device_comm.stream)
    progress.finish(progress.start(queued()))
    return device_comm.device.download(flat)


def rank_values(rank, length, step=0):
    return np.random.default_rng([rank, length, step]).standard_normal(length).astype(np.float32)


def rounded(values):
    return widen(to_bfloat16(values)).astype(np.float32)


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_get_the_same_sum(comm, new_comm):
    for exchange, device_comm, wire, case in cases(comm, new_comm, ALLREDUCES):
        for length in LENGTHS:
            own = rank_values(comm.rank, length)
            total = sum(rank_values(rank, length).astype(float) for rank in range(comm.size))
            found = run(device_comm, exchange.allreduce, own)
            tolerance = 1e-6 if wire == "float32" else 2e-2
            np.testing.assert_allclose(found, total, atol=tolerance * np.abs(total).max(), err_msg=case)
            assert len(set(comm.allgather(found.tobytes()))) == 1, case
            again = run(device_comm, exchange.allreduce, own)
            np.testing.assert_array_equal(again, found, err_msg=case)


def in_host_memory(kind, comm, values, wire, tags):
    """The same exchange there: ring.py's or tree.py's."""
    length, progress = len(values), ProgressEngine()
    exchanges = (
        host_tree.allreduce(comm, values, 0, length, wire, tags)
        if kind is DeviceTree
        else [ring_allreduce(comm, values, [], 0, length, wire, tags[0])]
    )
    for exchange in exchanges:
        progress.start(exchange)
    progress.finish()
    return values


@pytest.mark.ranks(1, 2, 3, 4)
def test_ring_and_tree_have_the_bits_of_those_in_host_memory(comm, new_comm):
    """Of sums and, step after step, of what rounding took and the next step added. At 4 ranks one has two children."""
    exchanges = [(kind, wire) for kind, wire in ALLREDUCES if kind in (DeviceRing, DeviceTree)]
    for exchange, device_comm, wire, case in cases(comm, new_comm, exchanges):
        for feedback in (False, True) if wire == "bfloat16" else (False,):
            for length in LENGTHS:
                host_wire = WireFormat(wire, 16, feedback).new(length)
                errors = [device_comm.device.empty((length,), np.float32)] if feedback else []
                for step in range(3 if feedback else 1):
                    values = rank_values(comm.rank, length, step)
                    found = run(device_comm, exchange.allreduce, values, *errors)
                    expected = in_host_memory(type(exchange), comm, values, host_wire, (1, 2))
                    np.testing.assert_array_equal(found, expected, err_msg=f"{case}, step {step}")
                    for kept in errors:
                        np.testing.assert_array_equal(device_comm.device.download(kept), host_wire.errors, err_msg=case)
                        assert kept.any() or comm.size == 1, case


class ThreadsComm:
    """Ranks that are threads: a send ends when it is received. boxes: by sender and receiver a queue."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.boxes, self.stream = rank, size, boxes, None
        self.device = SimpleNamespace(stream=None, cupy=None, empty=np.zeros)

    def send_and_receive(self, sends, receives):
        posted = [(array.copy(), threading.Event(), peer) for array, peer in sends]
        for array, received, peer in posted:
            self.boxes[self.rank, peer].put((array, received))
        for array, peer in receives:
            array[:], received = self.boxes[peer, self.rank].get(timeout=10)
            received.set()
        assert all(received.wait(10) for _, received, _ in posted)


def test_the_tree_sums_at_every_number_of_ranks(monkeypatch):
    """Up to five levels below the root. Whole numbers, so that the sums are exact."""
    monkeypatch.setattr(device_tree, "PIECE_BYTES", PIECE_BYTES)
    length = LENGTHS[0]

    def summed(rank, size, boxes):
        flat = (np.arange(length) % (rank + 2)).astype(np.float32)
        DeviceTree(ThreadsComm(rank, size, boxes), [(0, length)], WireFormat()).allreduce(flat)
        return flat

    for size in range(1, 18):
        boxes = {(sender, receiver): queue.Queue() for sender in range(size) for receiver in range(size)}
        expected = sum(np.arange(length) % (rank + 2) for rank in range(size))
        with ThreadPoolExecutor(size) as ranks:
            for found in ranks.map(lambda rank, size=size, boxes=boxes: summed(rank, size, boxes), range(size)):
                np.testing.assert_array_equal(found, expected, err_msg=f"{size} ranks")
        assert all(box.empty() for box in boxes.values()), f"{size} ranks"


@pytest.mark.ranks(1, 2, 3)
def test_a_sum_comes_in_parts_and_parts_come_together(comm, new_comm):
    """The ranks' own parts tile the vector. What is gathered comes rounded, unless nothing goes between nodes."""
    for exchange, device_comm, wire, case in cases(comm, new_comm, IN_PARTS):
        for length in LENGTHS:
            own = slice(*exchange.own_part(0, length))
            tiles = np.sort(np.concatenate(comm.allgather(np.arange(length)[own])))
            np.testing.assert_array_equal(tiles, np.arange(length), err_msg=case)
            total = sum(rank_values(rank, length).astype(float) for rank in range(comm.size))
            part = run(device_comm, exchange.reduce_scatter, rank_values(comm.rank, length))[own]
            tolerance = 1e-6 if wire == "float32" else 2e-2
            np.testing.assert_allclose(part, total[own], atol=tolerance * np.abs(total).max(), err_msg=case)
            values, filled = rank_values(9, length), np.full(length, JUNK, np.float32)
            filled[own] = values[own]
            found = run(device_comm, exchange.all_gather, filled)
            one_node = isinstance(exchange, NodeExchange) and case.endswith(f", {comm.size} a node")
            is_rounded = wire == "bfloat16" and comm.size > 1 and not one_node
            np.testing.assert_array_equal(found, rounded(values) if is_rounded else values, err_msg=case)


@pytest.mark.ranks(2)
def test_the_fake_nccl_refuses_what_would_hang(comm, new_comm, monkeypatch):
    """On real GPUs nothing would ever come of any of it, or other numbers."""
    monkeypatch.setattr(fake_nccl, "PATIENCE_S", 1.0)
    device_comm, other = new_comm("nccl", on_nodes(comm, 2)), 1 - comm.rank
    send, receive = (device_comm.device.empty((4,), np.float32) for _ in range(2))

    def refused(says, *groups):
        """Each a list of sends and one of receives; all are through when it returns."""
        comm.Barrier()
        for sends, receives in groups:
            device_comm.send_and_receive(sends, receives)
        with pytest.raises(AssertionError, match=says):
            device_comm.stream.synchronize()
        comm.Barrier()
        device_comm.stream.synchronize()

    refused(f"would hang: a receive: rank {other} sends nothing", ([], [(receive, other)]))
    refused("would hang: a send that nobody receives", ([(send, other)], []), ([], [(receive, other)]))
    refused(r"sends \(3, 7\), expected \(4, 7\)", ([(send[:3], other)], [(receive, other)]))
    with pytest.raises(AssertionError, match="outside of a group"):
        device_comm._communicator.send(send.data.ptr, 4, 7, other, device_comm.stream.ptr)
    with pytest.raises(TypeError, match="expected contiguous float32 or uint16"):
        device_comm.send_and_receive([(send[::2], other)], [(receive, other)])
