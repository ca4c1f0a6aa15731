"""Exchanges under way, and sums of numbers over ranks that are threads, over an MPI that delivers late."""

import math
import time

import pytest

from dist.progress_engine import ProgressEngine
from dist.waiting import Condition, EarlySum, barrier, gather_everywhere, sum_everywhere, wait_nearby
from tests.support.thread_ranks import run_ranks

# Of each rank. Added in any order in float64 these are 0, 1 or 2; their sum is 2.
NUMBERS = [1e16, 1.0, -1e16, 1.0]


def test_sums_are_exact():
    def program(world):
        return sum_everywhere(world.comm, NUMBERS[world.rank], float(world.rank)), gather_everywhere(world.comm, 5.0)

    for sums, gathered in run_ranks([4], program, most=5):
        assert sums == [2.0, 6.0]
        assert gathered.tolist() == [[5.0]] * 4


def test_an_early_sum_is_exact_over_parts_and_ranks():
    """Three times in a row. Rank 0 has four parts, rank 1 one, rank 2 none."""
    parts = [NUMBERS, [3.0], []], [[0.5] * 4, [1e16], []], [[-1e16, 0.1, 0.1, 0.1], [1e16], []]

    def program(world):
        total, found = EarlySum(world.comm, len(parts[0][world.rank])), []
        for each in parts:
            for part in each[world.rank]:
                total.add(part)
            found.append(total.result())
        return found

    expected = [math.fsum(math.fsum(own) for own in each) for each in parts]
    assert expected[:2] == [5.0, 1e16 + 2]
    for found in run_ranks([3], program, most=5):
        assert found == expected


def test_nobody_leaves_a_barrier_before_all_have_come():
    come = []

    def program(world):
        time.sleep(5e-3 * world.rank)
        come.append(world.rank)
        barrier(world.comm)
        return len(come)

    assert run_ranks([3], program, most=5) == [3] * 3


def test_other_work_moves_on_while_a_rank_waits():
    tested = []
    moved = []
    wait_nearby(Condition(lambda: tested.append(1) or len(tested) > 3), lambda: moved.append(1))
    assert len(moved) == 2


def test_an_error_of_one_rank_ends_all():
    def program(world):
        if world.rank == 1:
            raise KeyError("broken")
        barrier(world.comm)

    with pytest.raises(KeyError, match="broken"):
        run_ranks([3], program)


def test_one_exchange_can_be_waited_for_while_others_are_under_way():
    progress, asked, let_go = ProgressEngine(), [], []

    def another_ends():
        asked.append(1)
        assert len(asked) < 100, "waits for the other one, too"
        return bool(let_go)

    progress.start(iter([Condition(another_ends)]))
    progress.finish(progress.start(iter([Condition(lambda: True)])))
    assert progress.progress()
    let_go.append(1)
    progress.finish()
    assert not progress.progress()


def test_exchanges_begin_in_their_order_and_so_many_at_once():
    """Two at a time of four: the third begins when one of the first two has ended."""
    progress, begun, ended = ProgressEngine(in_flight=2), [], set()

    def exchange(number):
        begun.append(number)
        yield Condition(lambda: number in ended)

    for number in range(4):
        progress.start(exchange(number))
    assert begun == [0, 1]
    ended.add(1)
    assert progress.progress()
    assert begun == [0, 1, 2]
    ended.update(range(4))
    progress.finish()
    assert begun == [0, 1, 2, 3]
