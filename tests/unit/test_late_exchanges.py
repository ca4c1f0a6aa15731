"""Rings and trees over an MPI that delivers late and in an odd order: the same bits, and no wait can be left out.

All ranks are in one thread: an exchange is a generator, so each rank is moved on in turn.
"""

import ast
import inspect
import itertools
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

from dist.host import exchange, host_ring, host_tree
from dist.host.exchange import RingExchange, TreeExchange
from dist.wire import WireFormat
from tests.support.thread_ranks import Post

SEGMENT_BYTES = 100  # 25 values of float32: chunks have several, the last shorter
MOST_TURNS = 100_000  # of all ranks; an exchange that has not ended then hangs
WIRES = (WireFormat("float32", SEGMENT_BYTES), WireFormat("bfloat16", SEGMENT_BYTES, error_feedback=True))


def run(post, exchanges, begin):
    """begin(exchange, rank) on every rank, then all of them to their ends."""
    for rank, one in enumerate(exchanges):
        begin(one, rank)
    for _ in range(MOST_TURNS):
        if not any([one.engine.progress() for one in exchanges]):
            break
    else:
        pytest.fail("the exchange hangs")
    for late in post.lates:
        late.check_all_were_waited_for()


def whole_numbers(rank, size):
    """Few and small, so that sums are exact in both wires; other ones on each rank, and in each place."""
    return ((np.arange(size) * 7 + rank * 3) % 11).astype(np.float32)


def sums(ranks, size, per_rank=1):
    return sum(whole_numbers(rank + ranks * extra, size) for rank in range(ranks) for extra in range(per_rank))


def ring_results(ranks, size, wire, seed, most):
    """Each rank's vector after two all-reduces with an addend, of two ranges under way at once."""
    post, ranges = Post(ranks, seed, most), [(size // 3, size), (0, size // 3)]
    addends = [[whole_numbers(rank + ranks, size)] for rank in range(ranks)]
    rings = [RingExchange(comm, ranges, wire, added) for comm, added in zip(post.comms(), addends, strict=True)]
    vectors = [None] * ranks

    def begin(one, rank):
        vectors[rank] = whole_numbers(rank, size)
        for part in ranges:
            one.start_allreduce(vectors[rank], *part)

    for _ in range(2):
        run(post, rings, begin)
    return vectors


def tree_results(ranks, size, wire, seed, most):
    post, vectors = Post(ranks, seed, most), [None] * ranks
    trees = [TreeExchange(comm, [(0, size)], wire) for comm in post.comms()]

    def begin(one, rank):
        vectors[rank] = whole_numbers(rank, size)
        for part in ((size // 2, size), (0, size // 2)):
            one.start_allreduce(vectors[rank], *part)

    for _ in range(2):
        run(post, trees, begin)
    return vectors


def halves_results(ranks, size, wire, seed, most):
    """A reduce-scatter, and an all-gather of twice its sums, one at a time and in the memory of one range."""
    post, ranges = Post(ranks, seed, most), [(0, size // 4), (size // 4, size)]
    rings = [RingExchange(comm, ranges, wire, one_at_a_time=True) for comm in post.comms()]
    vectors = [whole_numbers(rank, size) for rank in range(ranks)]

    def begin(one, rank):
        for part in ranges:
            one.engine.start(one.reduce_scatter(vectors[rank], *part))

    run(post, rings, begin)
    for one, vector in zip(rings, vectors, strict=True):
        for part in ranges:
            own = slice(*one.own_part(*part))
            vector[own] *= 2
            others = np.setdiff1d(np.arange(*part), np.arange(own.start, own.stop))
            vector[others] = -1  # whatever is left there: nobody may take it for the sum

    def gather(one, rank):
        for part in ranges:
            one.engine.start(one.all_gather(vectors[rank], *part))

    run(post, rings, gather)
    return vectors


RESULTS = {ring_results: (2, 1), tree_results: (1, 1), halves_results: (1, 2)}  # addends a rank, factor


def assert_sums(results, ranks, size, wire, seed):
    per_rank, factor = RESULTS[results]
    for vector in results(ranks, size, wire, seed, 8):
        expected = factor * sums(ranks, size, per_rank)
        np.testing.assert_array_equal(vector, expected, err_msg=f"{size} {wire} {seed}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("results", RESULTS)
def test_late_and_odd_orders_change_no_sum(results, ranks):
    for size, wire, seed in itertools.product((1, 3, ranks, 61, 1001), WIRES, range(2)):
        assert_sums(results, ranks, size, wire, seed)


@pytest.mark.parametrize("results", RESULTS)
def test_sums_of_any_numbers_have_the_bits_of_a_kind_mpi(results, monkeypatch):
    """Rounding shows in which order values were added: it is the same, however late each message comes."""
    random = np.random.default_rng(3).standard_normal((10, 301)).astype(np.float32)
    monkeypatch.setitem(globals(), "whole_numbers", lambda rank, size: random[rank, :size].copy())
    for wire in WIRES:
        kind = np.array(results(5, 301, wire, 0, 0))
        assert (kind == kind[0]).all(), "the ranks' sums differ"
        for seed in range(3):
            np.testing.assert_array_equal(np.array(results(5, 301, wire, seed, 20)).view(np.uint32), kind.view("u4"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_gathered_does_not_mix_with_what_is_fed_back(ranks):
    """Parameters are gathered rounded to nearest, whatever the sums before them have left; and leave nothing."""
    post, size = Post(ranks, 1), 50
    rings = [RingExchange(comm, [(0, size)], WIRES[1]) for comm in post.comms()]
    sums = [np.linspace(1, 2, size, dtype=np.float32) for _ in rings]
    run(post, rings, lambda one, rank: one.engine.start(one.reduce_scatter(sums[rank], 0, size)))
    errors = [one.errors.copy() for one in rings]
    assert all(error.any() for error in errors)
    parameters = np.linspace(3, 5, size, dtype=np.float32)
    vectors = [parameters.copy() for _ in rings]
    run(post, rings, lambda one, rank: one.engine.start(one.all_gather(vectors[rank], 0, size)))
    for one, before, vector in zip(rings, errors, vectors, strict=True):
        np.testing.assert_array_equal(vector, parameters.astype(ml_dtypes.bfloat16).astype(np.float32))
        np.testing.assert_array_equal(one.errors, before)


def test_what_rounding_takes_is_fed_back_to_the_next_sum():
    """Two ranks: the mean of many exchanges of the same numbers comes to their sum, which no single one has."""
    for make in (
        lambda comm: RingExchange(comm, [(0, 40)], WIRES[1]),
        lambda comm: TreeExchange(comm, [(0, 40)], WIRES[1]),
    ):
        post, own = Post(2, 1, 0), np.linspace(1, 2, 40, dtype=np.float32)
        both, total = [make(comm) for comm in post.comms()], np.zeros(40)
        for _ in range(200):
            vectors = [own.copy(), own.copy()]
            run(post, both, lambda one, rank, vectors=vectors: one.start_allreduce(vectors[rank], 0, 40))
            total += vectors[0]
        assert np.abs(total / 200 - 2 * own).max() < 4e-4


def waits_of(module) -> list[ast.Expr]:
    """The statements that wait: `yield` of one request, or `yield from` a list of them."""
    statements = [node for node in ast.walk(module) if isinstance(node, ast.Expr)]
    single = [node for node in statements if isinstance(node.value, ast.Yield)]
    several = [node for node in statements if isinstance(node.value, ast.YieldFrom)]
    return [
        *(node for node in single if isinstance(node.value.value, ast.Name | ast.Subscript)),
        *(node for node in several if isinstance(node.value.value, ast.Name)),
    ]


def without_wait(module: ModuleType, number: int) -> ModuleType:
    """The module with one of its waits left out: `yield from ()` in its place."""
    text = ast.parse(inspect.getsource(module))
    waits_of(text)[number].value = ast.YieldFrom(ast.Tuple([], ast.Load()))
    broken = ModuleType(module.__name__)
    exec(compile(ast.fix_missing_locations(text), module.__file__, "exec"), vars(broken))
    return broken


WAITS = [
    (module, number, wait.lineno)
    for module in (host_ring, host_tree)
    for number, wait in enumerate(waits_of(ast.parse(inspect.getsource(module))))
]


@pytest.mark.parametrize(("module", "number", "line"), WAITS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_wait_can_be_left_out(module, number, line, monkeypatch):
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(exchange, name, without_wait(module, number))
    cases = (ring_results, halves_results) if module is host_ring else (tree_results,)
    with pytest.raises((AssertionError, IndexError)):  # or what was sent is not there yet
        list(map(assert_sums, cases, (4, 4), (301, 301), WIRES[:1] * 2, (1, 1)))


def test_there_are_waits_to_leave_out():
    assert [sum(module is each for each, *_ in WAITS) for module in (host_ring, host_tree)] == [4, 5]


class Sent:
    """Two ranks, and a message between them that begins."""

    def __init__(self):
        self.post = Post(2, seed=0, most=3)
        first, second = self.post.comms()
        self.sent, self.received = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
        self.receive, self.send = second.Irecv(self.received, 0), first.Isend(self.sent, 1)

    def end(self):
        for request in (self.receive, self.send):
            for _ in range(5):
                request.Test()


def test_a_buffer_is_nothing_until_its_wait():
    message = Sent()
    assert np.isnan(message.received).all()
    message.end()
    np.testing.assert_array_equal(message.received, np.arange(5))
    assert message.send.Test()
    assert message.receive.Test()


def test_buffers_used_too_early_are_named():
    message = Sent()
    message.sent[2] = 9
    with pytest.raises(AssertionError, match="changed before its wait: send"):
        message.end()
    message = Sent()
    message.received[2] = 9
    with pytest.raises(AssertionError, match="written to before its wait: receive"):
        message.end()
    with pytest.raises(AssertionError, match="never waited for: send"):
        message.post.lates[0].check_all_were_waited_for()
