"""Our own exchanges, their wires, what moves them on, the memory a node shares, and the links they cross."""

import mmap
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from dist import shared_memory
from dist.buffers import NodeBuffers
from dist.host import host_ring, host_tree
from dist.probe.links import bucket_bytes, probe_links, rate_both_ways, segment_bytes
from dist.progress_engine import ProgressEngine, progressing
from dist.ranges import cut_range
from dist.waiting import Condition, wait
from dist.wire import PlainWire, WireFormat, round_to_bfloat16, widen
from dist.world import world_of

SEGMENT_BYTES = 10_000  # so that chunks have several, the last shorter


def rounded(values):
    half = np.empty(len(values), np.uint16)
    round_to_bfloat16(values, half)
    result = np.empty_like(values)
    widen(half, result)
    return result


def nearest_bfloat16(value):
    """By search among the neighbours, in float64: 8 bits of significand, ties to the even one."""
    mantissa, exponent = np.frexp(np.float64(value))
    scaled = mantissa * 256
    return np.ldexp(np.round(scaled), exponent - 8)  # np.round takes ties to even


def test_bfloat16_is_the_nearest():
    random = np.random.default_rng(1)
    values = (random.standard_normal(4000) * 10.0 ** random.integers(-30, 30, 4000)).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], np.float32)
    values = np.concatenate([values, ties, np.zeros(1, np.float32)])
    np.testing.assert_array_equal(rounded(values), [nearest_bfloat16(value) for value in values])


def test_bfloat16_keeps_what_is_no_number():
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    result = rounded(bits.view(np.float32))
    assert result[0] == np.inf
    assert result[1] == -np.inf
    assert np.isnan(result[2:]).all()


def test_exchanges_move_on_while_something_else_is_waited_for():
    seen = []

    def exchange():
        for number in range(3):
            yield Condition(lambda: True)
            seen.append(number)
            yield Condition(lambda number=number: len(asked) > number)

    asked = []
    progress = ProgressEngine()
    progress.start(exchange())
    progress.wait(Condition(lambda: asked.append(1) or len(seen) == 3))
    assert seen == [0, 1, 2]
    assert 3 <= len(asked) <= 4


def test_an_error_in_an_exchange_is_not_swallowed():
    def exchange():
        yield Condition(lambda: True)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        ProgressEngine().start(exchange())


def test_poking_follows_each_function():
    calls = []
    functions = progressing(
        SimpleNamespace(double=lambda x: calls.append("double") or 2 * x), lambda: calls.append("progress")
    )
    assert functions.double(4) == 8
    assert calls == ["double", "progress"]


def ring(comm, flat, wire):
    """All-reduce flat and an addend of each rank's, in one exchange."""
    addends = [np.full(len(flat), comm.rank % 3, np.float32)]
    return [host_ring.allreduce(comm, flat, addends, 0, len(flat), wire, tag=3)]


def tree(comm, flat, wire):
    flat += comm.rank % 3
    return host_tree.allreduce(comm, flat, 0, len(flat), wire, tags=(3, 4))


@pytest.mark.ranks(1, 2, 3, 4, 7)
def test_rings_and_trees_sum_exactly(comm):
    """Small whole numbers have exact sums in float32, and up to 256 in bfloat16 too; every size, also below N.

    At 7 ranks some are two levels below a tree's root.
    """
    progress = ProgressEngine()
    for exchanges, wire, size in product((ring, tree), ("float32", "bfloat16"), (1, 3, comm.size, 1001, 70_001)):
        flat = ((np.arange(size) + comm.rank) % 17).astype(np.float32)
        for exchange in exchanges(comm, flat, WireFormat(wire, SEGMENT_BYTES).new(size)):
            progress.start(exchange)
        progress.finish()
        everyone = sum((np.arange(size) + rank) % 17 + rank % 3 for rank in range(comm.size))
        np.testing.assert_array_equal(flat, everyone, err_msg=f"{exchanges.__name__} {size} {wire}")


@pytest.mark.ranks(1, 2, 3)
def test_an_allreduce_says_halfway_which_sums_are_complete(comm):
    flat, said, progress = np.full(50, comm.rank + 1.0, np.float32), [], ProgressEngine()

    def summed(start, stop):
        said.append((start, stop, flat[start:stop].tolist()))

    progress.start(host_ring.allreduce(comm, flat, [], 3, 50, PlainWire(SEGMENT_BYTES), 2, summed))
    progress.finish()
    start, stop = cut_range(3, 50, comm.size)[comm.rank]
    assert said == [(start, stop, [sum(range(1, comm.size + 1))] * (stop - start))]


@pytest.mark.ranks(3)
def test_a_node_shares_its_memory(comm):
    """Two nodes, of two ranks and of one: parameters once a node, gradients seen by the others after they arrived."""
    world = world_of(comm, comm.Split(comm.rank // 2, comm.rank))
    buffers = NodeBuffers(world, 50)
    assert buffers.fills_parameters == (world.local_rank == 0)
    assert not buffers.parameters.any()
    comm.Barrier()
    buffers.gradients[:] = comm.rank + 1
    if world.local_rank == 0:
        buffers.parameters[:] = 7 + world.node
    buffers.arrive()
    wait(buffers.arrived(range(world.local_size), 1))
    assert [array[0] for array in buffers.local_gradients] == ([1, 2] if world.node == 0 else [3])
    assert (buffers.parameters == 7 + world.node).all()
    assert not buffers.arrived(range(world.local_size), 2).Test()
    buffers.close()


@pytest.mark.ranks(3)
def test_too_little_shared_memory_ends_the_job(comm, monkeypatch, capsys):
    """Of a node of 3 ranks: their gradients, and the parameters once, 4 bytes each; a block too few is too little."""
    world = world_of(comm, comm.Split(0, comm.rank))
    for blocks, is_short in ((400, False), (399, True)):
        monkeypatch.setattr(
            shared_memory.os, "statvfs", lambda folder, n=blocks: SimpleNamespace(f_bavail=n, f_frsize=40)
        )
        with pytest.raises(SystemExit) if is_short else nullcontext():
            NodeBuffers(world, 1000).close()
        printed = capsys.readouterr().err
        assert ("/dev/shm has 0.0 MB free, expected 0.0 MB for the buffers" in printed) == (is_short and comm.rank == 0)


@pytest.mark.ranks(2)
def test_a_rank_alone_on_its_node_needs_no_shared_memory(comm, monkeypatch):
    """Its buffers are private and zeroed, each on pages of its own, even if /dev/shm is full."""
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: SimpleNamespace(f_bavail=0, f_frsize=40))
    buffers = NodeBuffers(world_of(comm, comm.Split(comm.rank, comm.rank)), 1000)
    for array in (buffers.parameters, buffers.gradients):
        assert array.ctypes.data % mmap.PAGESIZE == 0
        assert array.tolist() == [0.0] * 1000
    buffers.close()


@pytest.mark.ranks(3)
def test_links_are_probed_between_nodes(comm):
    """Every node has a link, with rates that a memory copy can have; one node has none."""
    links = probe_links(world_of(comm, comm.Split(comm.rank, comm.rank)))
    assert [link["node"] for link in links] == list(range(comm.size))
    for link in links:
        assert 0 < link["latency_s"] < 1
        assert all(1e5 < link[rate] < 1e12 for rate in ("out", "in", "both"))
    assert probe_links(world_of(comm, comm.Split(0, comm.rank))) == []


def test_a_segment_is_worth_its_message():
    """Half a millisecond of the slowest link, within limits; the most where nothing crosses a network."""
    links = [{"both": 1.25e9}, {"both": 0.5e9}]
    assert segment_bytes(rate_both_ways(links)) == 250_000
    assert segment_bytes(50e6) == 60_000
    assert segment_bytes(12e9) == segment_bytes(rate_both_ways([])) == 1 << 20


@pytest.mark.parametrize("length", [0, 1, 49, 50, 51, 1003])
def test_segments_tile_a_range(length):
    pieces = PlainWire(200).segments(7, 7 + length)
    assert [start for start, _ in pieces] == [7, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == 7 + length
    assert len(pieces) == max(1, -(-length // 50))
    assert max(stop - start for start, stop in pieces) <= 50


def test_buckets_grow_with_latency_and_rate():
    slow = [{"latency_s": 1e-3, "both": 50e6}] * 5
    assert bucket_bytes(slow) == pytest.approx(20 * 1e-3 * 50e6 * 5)
    assert bucket_bytes([]) == bucket_bytes([{"latency_s": 1e-6, "both": 1e6}] * 2)
