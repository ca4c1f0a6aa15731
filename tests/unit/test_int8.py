"""--wire int8: blocks and the direct exchange, bit for bit as in PyTorch, over an MPI that delivers late."""

import json

import numpy as np
import pytest

from dist.cost.messages import Setting, sums_of_nodes
from dist.cost.stages import node_traffic
from dist.host import direct_exchange
from dist.host.direct_exchange import DirectExchange
from dist.ranges import cut_range
from dist.wire import LANDING_BYTES, WIRE_BYTES, Int8Wire, WireFormat
from tests.fixtures.make_int8_fixture import PATH, SIZE, digest, values
from tests.support.thread_ranks import Post
from tests.unit.test_late_exchanges import run, without_wait

SEGMENT_BYTES = 150  # two blocks


def exchanges(post, ranges=((0, SIZE),), feedback=True, segment_bytes=SEGMENT_BYTES, addends=None):
    wire = WireFormat("int8", segment_bytes, feedback)
    return [DirectExchange(comm, ranges, wire, addends[comm.rank] if addends else ()) for comm in post.comms()]


def summed(post, made, vectors, ranges=((0, SIZE),)):
    """Each rank's vector after an all-reduce of each range, all under way at once."""
    vectors = [vector.copy() for vector in vectors]

    def begin(one, rank):
        for part in ranges:
            one.engine.start(one.allreduce(vectors[rank], *part))

    run(post, made, begin)
    return vectors


@pytest.mark.parametrize(("ranks", "steps"), json.loads(PATH.read_text()).items())
@pytest.mark.parametrize("segment_bytes", [SEGMENT_BYTES, 1 << 20])
def test_sums_and_errors_have_the_bits_of_pytorch(ranks, steps, segment_bytes):
    post = Post(int(ranks), seed=1, most=8)
    made = exchanges(post, segment_bytes=segment_bytes)
    for step, (sums, errors) in enumerate(steps):
        vectors = summed(post, made, [values(rank, step) for rank in range(int(ranks))])
        assert {digest([vector]) for vector in vectors} == {sums}, f"step {step}: other sums"
        assert digest([one.errors for one in made]) == errors, f"step {step}: other errors"


def test_without_feedback_every_exchange_is_the_first():
    post, own = Post(3, seed=2, most=8), [values(rank, 0) for rank in range(3)]
    made = exchanges(post, feedback=False)
    first, second = (summed(post, made, own) for _ in range(2))
    assert all(one.errors is None for one in made)
    assert {digest([vector]) for vector in first + second} == {json.loads(PATH.read_text())["3"][0][0]}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_sums_of_late_messages_of_any_size(ranks):
    """Buckets under way at once, with addends: each off by at most half a scale for each rounding, the same bits on
    all ranks, and in each bucket the bits that it has when it is exchanged alone."""
    random = np.random.default_rng(ranks)
    for size, seed in ((1, 0), (ranks, 1), (ranks + 1, 2), (1025, 3), (5003, 4)):
        own, more = random.uniform(-1, 1, (2, ranks, size)).astype(np.float32)
        ranges = [(size // 3, size), (0, size // 3)]
        addends = [[each] for each in more]
        results = []
        for parts in (ranges, ranges[1:], ranges[:1]):
            post = Post(ranks, seed, 20)
            results.append(summed(post, exchanges(post, ranges, addends=addends), own, parts))
        together, low, high = results
        expected = np.sum(own + more, 0, np.float64)
        for vector in together:
            assert vector.tobytes() == together[0].tobytes()
            assert np.abs(vector - expected).max() <= (2 * 2 * ranks / 254 if ranks > 1 else 1e-6)
        np.testing.assert_array_equal(together[0][: size // 3], low[0][: size // 3])
        np.testing.assert_array_equal(together[0][size // 3 :], high[0][size // 3 :])


@pytest.mark.parametrize("size", [2, 4000])
def test_an_own_chunk_is_final_once(size):
    post, vectors = Post(4, 5, 8), [np.full(size, 1 + rank, np.float32) for rank in range(4)]
    final = [[] for _ in vectors]

    def begin(one, rank):
        def note(*part):
            final[rank].append((*part, vectors[rank][slice(*part)].tobytes()))

        one.engine.start(one.allreduce(vectors[rank], 0, size, note))

    run(post, exchanges(post, [(0, size)]), begin)
    assert final == [[(*part, vectors[0][slice(*part)].tobytes())] for part in cut_range(0, size, 4)]


@pytest.mark.parametrize("number", range(2))
def test_no_wait_can_be_left_out(number, monkeypatch):
    monkeypatch.setattr(direct_exchange, "allreduce", without_wait(direct_exchange, number).allreduce)
    with pytest.raises(AssertionError):
        test_sums_and_errors_have_the_bits_of_pytorch("4", json.loads(PATH.read_text())["4"], 1 << 20)


def through_wire(block):
    """Return the values that arrive of a block, and the errors that stay."""
    wire, arrived = Int8Wire(len(block), 1000), np.empty(len(block), np.float32)
    wire.unpack(wire.packed(block, 0, len(block)), arrived, 0, len(block))
    return arrived, wire.errors


def test_nan_and_infinity_arrive_as_such_and_leave_no_error():
    """Others of their block arrive rounded, blocks beside it as without them."""
    block = np.linspace(-2, 2, 1000, dtype=np.float32)
    for special in (np.nan, np.inf, -np.inf):
        sick = block.copy()
        sick[[300, 411]] = special
        sick[301] = -special
        arrived, errors = through_wire(sick)
        is_special = ~np.isfinite(sick)
        np.testing.assert_array_equal(arrived[is_special], sick[is_special])
        assert np.abs(arrived - block)[~is_special].max() <= 2 / 250
        np.testing.assert_array_equal(errors[~is_special], sick[~is_special] - arrived[~is_special])
        assert (errors[is_special] == 0).all()
        for beside in (slice(0, 256), slice(512, 1000)):
            np.testing.assert_array_equal(arrived[beside], through_wire(block)[0][beside])
    only, _ = through_wire(np.full(3, np.inf, np.float32))
    assert (only == np.inf).all()


def test_a_sum_of_nan_and_infinity_reaches_all_ranks():
    post, vectors = Post(3, 6, 8), [values(rank, 0) for rank in range(3)]
    vectors[0][5], vectors[1][700], vectors[2][[1500, 2300]] = np.nan, np.inf, (-np.inf, np.inf)
    for vector in summed(post, exchanges(post), vectors):
        assert np.isnan(vector[5])
        np.testing.assert_array_equal(np.flatnonzero(np.isinf(vector)), [700, 1500, 2300])
        assert vector[1500] == -np.inf


def test_small_and_large_numbers_do_not_overflow():
    for size in (1, 255, 256, 257):
        for value in (0.0, 1e-45, 100e-45, 1e-38, 1.5e-36, 1e38):
            block = np.full(size, value, np.float32)
            arrived, errors = through_wire(block)
            assert np.isfinite(arrived).all()
            assert np.abs(arrived - block).max() <= max(value / 250, 2.0**-127)
            np.testing.assert_array_equal(arrived + errors, block)


def test_ties_go_to_the_even_number():
    halves = np.insert((np.arange(-126, 126) + 0.5).reshape(4, 63), 0, 127, axis=1).astype(np.float32).ravel()
    np.testing.assert_array_equal(through_wire(halves)[0], np.rint(halves))


@pytest.mark.parametrize("elements", [64 * 5 * 4000, 100_003])
def test_a_port_carries_at_most_27_hundredths_of_float32(elements, monkeypatch):
    """As many bytes as the cost model counts, up to the last blocks; the messages of a turn fit into LANDING_BYTES."""
    post, sent = Post(5, 0, 0), [[] for _ in range(5)]
    deliver = post.send

    def send(key, copy):
        sent[key[1]].append(copy.nbytes)
        return deliver(key, copy)

    monkeypatch.setattr(post, "send", send)
    ranges = [(0, elements)]
    made = exchanges(post, ranges, segment_bytes=1 << 24)
    for vector in summed(post, made, [np.ones(elements, np.float32)] * 5, ranges):
        assert np.abs(vector - 5).max() < (4 + 5) / 250
    assert max(map(max, sent)) <= LANDING_BYTES // 5
    sent = [sum(each) for each in sent]
    assert max(sent) <= 0.27 * 4 * elements * 2 * 4 / 5
    stages, _ = sums_of_nodes(Setting(np.arange(5), elements, WIRE_BYTES["int8"]))
    for counted in node_traffic(stages, range(5)):
        np.testing.assert_allclose(counted, sent, rtol=0, atol=2 * 8 if elements % 320 else 0)
