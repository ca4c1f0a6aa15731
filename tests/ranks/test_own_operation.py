"""The operation of our own in MPI's collectives: sums, bits, lengths, and types that are not one number."""

import sys
from functools import cache

import numpy as np
import pytest

from dist.host.operation import OwnSum, new_operation
from dist.mpi import MPI
from dist.wire import BFLOAT16, WireFormat, round_to_bfloat16, widen
from tests.support.launch import launch

LENGTHS = (0, 1, 2, 7, 1000, 16385, 100_003)
SPECIAL = np.array([np.inf, -np.inf, np.nan, 3.4e38, -0.0, 1e-40, 1.0, -1.0], np.float32)


@cache
def operation(bfloat16: bool):
    """Compiled once for all tests of a process."""
    return OwnSum(bfloat16).op


def vectors(ranks: int, length: int) -> list[np.ndarray]:
    return [np.random.default_rng([rank, length]).standard_normal(length).astype(np.float32) for rank in range(ranks)]


def bits(values) -> np.ndarray:
    half = np.empty(len(values), np.uint16)
    round_to_bfloat16(values, half)
    return half


def widened(half) -> np.ndarray:
    values = np.empty(len(half), np.float32)
    widen(half, values)
    return values


@pytest.mark.ranks(1, 2, 3, 4)
def test_sums_are_mpis_own(comm):
    """In every collective that strategies call, in place and not, twice the same bits, the same on all ranks."""
    for length in LENGTHS:
        own, everyone = vectors(comm.size, length)[comm.rank], vectors(comm.size, length)
        exact = np.sum(everyone, axis=0, dtype=np.float64)
        close = 1e-6 * np.sum(np.abs(everyone), axis=0)
        summed = own.copy()
        comm.Allreduce(MPI.IN_PLACE, summed, operation(False))
        assert (np.abs(summed - exact) <= close).all()
        assert len(set(comm.allgather(summed.tobytes()))) == 1
        again, root = np.empty_like(own), length % comm.size
        comm.Allreduce(own, again, operation(False))
        assert again.tobytes() == summed.tobytes()
        reduced = own.copy()
        if comm.rank == root:
            comm.Ireduce(MPI.IN_PLACE, reduced, operation(False), root).Wait()
            assert (np.abs(reduced - exact) <= close).all()
        else:
            comm.Ireduce(reduced, None, operation(False), root).Wait()
        blocks = np.tile(own, comm.size)
        block = np.empty_like(own)
        comm.Reduce_scatter_block(blocks, block, operation(False))
        assert (np.abs(block - exact) <= close).all()


@pytest.mark.ranks(2, 3, 4)
def test_sums_of_bfloat16_are_rounded_once_for_each_addition(comm):
    """Each loses 2^-8 of its partial sum at most. Two ranks make one addition, whose bits are known."""
    for length in LENGTHS:
        everyone = [widened(bits(values)) for values in vectors(comm.size, length)]
        summed = bits(everyone[comm.rank])
        comm.Allreduce(MPI.IN_PLACE, summed, operation(True))
        assert len(set(comm.allgather(summed.tobytes()))) == 1
        exact = np.sum(everyone, axis=0, dtype=np.float64)
        most = (comm.size - 1) * 2**-8 * np.sum(np.abs(everyone), axis=0)
        assert (np.abs(widened(summed) - exact) <= most).all()
        if comm.size == 2:
            assert summed.tobytes() == bits(everyone[0] + everyone[1]).tobytes()


@pytest.mark.ranks(2)
def test_every_pair_of_special_numbers_adds_as_ml_dtypes_says(comm):
    """And ties, both ways: 1 + 2^-8 and 1 + 3 x 2^-8 lie between two bfloat16 numbers."""
    numbers = bits(np.concatenate([SPECIAL, np.float32([2**-8, 3 * 2**-8, 257, 2.0**127])]))
    pairs = np.repeat(numbers, len(numbers)) if comm.rank == 0 else np.tile(numbers, len(numbers))
    summed = pairs.copy()
    comm.Allreduce(MPI.IN_PLACE, summed, operation(True))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.repeat(numbers, len(numbers)).view(BFLOAT16) + np.tile(numbers, len(numbers)).view(BFLOAT16)
    np.testing.assert_array_equal(widened(summed), expected.astype(np.float32))


@pytest.mark.ranks(3)
def test_types_made_of_such_numbers_side_by_side(comm):
    triple = MPI.FLOAT.Create_contiguous(3).Commit()
    own = np.arange(33, dtype=np.float32)
    summed = np.zeros_like(own)
    comm.Allreduce([own, 11, triple], [summed, 11, triple], operation(False))
    triple.Free()
    np.testing.assert_array_equal(summed, 3 * own)


def test_a_type_with_gaps_ends_the_job(tmp_path):
    """It would add what lies between; and does not hang."""
    program = tmp_path / "gaps.py"
    program.write_text(
        "import numpy as np\n"
        "from dist.world import start_world\n"
        "comm = start_world().comm\n"
        "from dist.mpi import MPI\n"
        "from dist.host.operation import OwnSum\n"
        "gaps = MPI.FLOAT.Create_vector(2, 1, 2).Commit()\n"
        "flat = np.ones(30, np.float32)\n"
        "comm.Allreduce([flat, 10, gaps], [flat.copy(), 10, gaps], OwnSum().op)\n"
        "print('went on')\n"
    )
    result = launch(2, [sys.executable, str(program)])
    assert result.returncode != 0
    assert "went on" not in result.stdout


@pytest.mark.ranks(1)
def test_an_own_operation_is_freed_and_mpis_is_not(comm):
    mpis, own = new_operation(WireFormat()), new_operation(WireFormat("bfloat16", operation="own"))
    mpis.close()
    own.close()
    assert mpis.op == MPI.SUM
    assert own.op == MPI.OP_NULL
