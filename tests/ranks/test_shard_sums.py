"""Sums over the parts of a stage, in memory that a node shares and by messages: sums, bits, and who must wait."""

import time
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from dist.shard_sums import SMALL, RingSums, SharedMemorySums
from dist.world import world_of

# Rows that do not divide by the parts, fewer rows than parts; of small rooms and beyond.
SHAPES = [(5, 7), (1, 3), (1, 1), (2, SMALL // 2), (3, SMALL // 3 + 1), (1, SMALL + 1), (129, 257)]
ELEMENTS = 129 * 257
KINDS = pytest.mark.parametrize("kind", [SharedMemorySums, RingSums])
DAWDLING_S = 0.02


def no_phase(name, bytes):
    return nullcontext()


def parts_of(comm, kind, elements=ELEMENTS, phase=no_phase):
    """All ranks of comm are parts: of one node, or of a node each."""
    color = 0 if issubclass(kind, SharedMemorySums) else comm.rank
    return kind(world_of(comm.Dup(), comm.Split(color, comm.rank)), elements, phase)


def values(rank, shape, seed=0):
    return np.random.default_rng([rank, seed]).standard_normal(shape).astype(np.float32)


def summed(comm, shape, seed=0):
    """In float64."""
    return sum(values(rank, shape, seed).astype(np.float64) for rank in range(comm.size))


def check_sum(comm, found, shape, seed=0):
    np.testing.assert_allclose(found, summed(comm, shape, seed), rtol=0, atol=1e-6 * comm.size)
    assert found.shape == shape
    assert len(set(comm.allgather(found.tobytes()))) == 1, "ranks have different bits"


@KINDS
@pytest.mark.ranks(1, 2, 3, 4)
def test_sums_of_rows(comm, kind):
    parts = parts_of(comm, kind)
    for seed, shape in enumerate([*SHAPES, *SHAPES]):
        own = values(comm.rank, shape, seed)
        check_sum(comm, parts.sum(own), shape, seed)
        assert (own == values(comm.rank, shape, seed)).all(), "the rows have changed"
        room = parts.room(shape)
        room[:] = own
        check_sum(comm, parts.sum(room), shape, seed)
        assert (room == own).all(), "the room has changed"
    parts.close()


@KINDS
@pytest.mark.ranks(1, 2, 3)
def test_rows_of_one_number_each_are_filled_in_place(comm, kind):
    parts = parts_of(comm, kind)
    for seed, count in enumerate((1, 2, 7, SMALL, SMALL + 5, 3 * SMALL)):
        rows = values(comm.rank, (count,), seed)
        assert parts.sum(rows) is rows
        check_sum(comm, rows, (count,), seed)
        rows = values(comm.rank, (count,), seed)
        assert parts.maximum(rows) is rows
        everyone = [values(rank, (count,), seed) for rank in range(comm.size)]
        assert (rows == np.max(everyone, axis=0)).all()
    parts.close()


@KINDS
@pytest.mark.ranks(2, 3)
def test_arrays_are_lent_by_the_first_part(comm, kind):
    """Less than a small room, more, an empty array, a matrix; of the others only the arrays that are named change."""
    parts = parts_of(comm, kind)
    for sizes in ((3,), (5, 0, 7, 1), (SMALL - 1, 4, SMALL, 2 * SMALL + 9, 2)):
        memory = values(comm.rank, (sum(sizes) + len(sizes),))
        stops = np.cumsum([size + 1 for size in sizes]).tolist()
        arrays = [memory[stop - size - 1 : stop - 1] for size, stop in zip(sizes, stops, strict=True)]
        parts.broadcast([arrays[0].reshape(-1, 1), *arrays[1:]])
        expected, lent = values(comm.rank, memory.shape), values(0, memory.shape)
        for size, stop in zip(sizes, stops, strict=True):
            expected[stop - size - 1 : stop - 1] = lent[stop - size - 1 : stop - 1]
        assert (memory == expected).all()
    parts.close()


@KINDS
@pytest.mark.ranks(1, 2, 3)
def test_shares_are_joined(comm, kind):
    parts = parts_of(comm, kind)
    for shape in SHAPES:
        whole, rows = values(9, shape), np.full(shape, np.nan, np.float32)
        start, stop = parts.share(rows.size)
        rows.reshape(-1)[start:stop] = whole.reshape(-1)[start:stop]
        assert parts.join(rows) is rows
        assert (rows == whole).all()
        assert sum(comm.allgather(stop - start)) == rows.size
    parts.close()


@KINDS
@pytest.mark.ranks(2, 3)
def test_a_sum_of_rows_stays_until_the_next(comm, kind):
    """While others calls follow, and while the next partial rows are written into the room."""
    parts, shape = parts_of(comm, kind), (129, 257)
    for seed in range(5):
        total = parts.sum(values(comm.rank, shape, seed))
        parts.sum(values(comm.rank, (300,)))
        parts.maximum(values(comm.rank, (SMALL + 1,)))
        parts.broadcast([values(comm.rank, (2 * SMALL,))])
        parts.join(values(9, shape))
        parts.room(shape)[:] = -1.0
        comm.Barrier()
        check_sum(comm, total, shape, seed)
    parts.close()


@KINDS
@pytest.mark.ranks(2, 3)
def test_calls_in_a_drawn_order_with_ranks_that_dawdle(comm, kind):
    """Each rank sleeps where it likes: before a call, while it reads, while it adds."""
    parts = parts_of(comm, dawdling(kind, comm.rank))
    draw, own = np.random.default_rng(5), np.random.default_rng([7, comm.rank])
    for seed in range(60):
        shape = SHAPES[draw.integers(len(SHAPES))]
        call = draw.choice(["rows", "room", "numbers", "maximum", "lend", "join"])
        flat, mine = (int(np.prod(shape)),), values(comm.rank, shape, seed)
        if own.random() < 0.3:
            time.sleep(own.random() * 2e-3)
        if call in ("rows", "room"):
            rows = mine
            if call == "room":
                rows = parts.room(shape)
                rows[:] = mine
            found = parts.sum(rows)
            time.sleep(own.random() * 1e-3)
            check_close(found, summed(comm, shape, seed))
        elif call == "numbers":
            check_close(parts.sum(mine.reshape(-1)), summed(comm, shape, seed).reshape(-1))
        elif call == "maximum":
            everyone = [values(rank, shape, seed).reshape(-1) for rank in range(comm.size)]
            assert (parts.maximum(mine.reshape(-1)) == np.max(everyone, axis=0)).all()
        elif call == "lend":
            parts.broadcast([mine])
            assert (mine == values(0, shape, seed)).all()
        else:
            whole, rows = values(9, flat, seed), np.zeros(flat, np.float32)
            rows[slice(*parts.share(len(rows)))] = whole[slice(*parts.share(len(rows)))]
            assert (parts.join(rows) == whole).all()
    parts.close()


def check_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def dawdling(kind, rank):
    """Parts that now and then sleep between meeting the others and using what they wrote, or before adding a share."""
    if kind is RingSums:
        return RingSums

    class Dawdling(SharedMemorySums):
        calls = 0

        def _meet(self):
            super()._meet()
            self.calls += 1
            if self.calls % 3 == rank:
                time.sleep(1e-3)

    return Dawdling


@pytest.mark.ranks(2, 3)
def test_a_sum_is_complete_when_the_slowest_has_added_its_share(comm):
    class Slow(SharedMemorySums):
        def _meet(self):
            super()._meet()
            if comm.rank == comm.size - 1:
                time.sleep(DAWDLING_S)

    parts, shape = parts_of(comm, Slow), (129, 257)
    for seed in range(3):
        check_sum(comm, parts.sum(values(comm.rank, shape, seed)).copy(), shape, seed)
    parts.close()


@KINDS
@pytest.mark.ranks(2)
def test_phases_and_bytes(comm, kind):
    """Each call is a phase of the rows' bytes."""
    seen = []

    @contextmanager
    def phase(name, bytes):
        seen.append((name, bytes))
        yield

    parts = parts_of(comm, kind, phase=phase)
    rows = values(comm.rank, (100, 200))
    parts.sum(rows)
    parts.maximum(rows[0])
    parts.broadcast([rows[0], rows[1, :3]])
    parts.join(rows)
    assert seen == [("tensor", 80_000), ("tensor", 800), ("lend", 812), ("tensor", 80_000)]
    parts.close()


@pytest.mark.ranks(2)
def test_rows_beyond_the_room_are_refused(comm):
    for kind in (SharedMemorySums, RingSums):
        parts = parts_of(comm, kind, elements=20)
        with pytest.raises(ValueError, match="rows of 21 elements, expected at most 20"):
            parts.sum(values(0, (3, 7)))
        parts.close()
