"""Every strategy over an MPI that delivers late and in an odd order, and with ranks that dawdle: the same bits."""

import time

import numpy as np
import pytest

from dist.waiting import wait
from gpt2.optimizer import AdamW, AdamWSettings
from strategies import STRATEGIES
from tests.ranks import test_overlap as small
from tests.support.late_mpi import Late, late_comm

NODES = {2: [1, 1], 3: [1, 2], 4: [2, 2]}  # ranks of each node
DAWDLING_S = 5e-3


class Dawdling(AdamW):
    """Of the rank that updates last: who does not wait for it goes on with its old parameters."""

    def update(self, *arguments):
        time.sleep(DAWDLING_S)
        super().update(*arguments)


def makes(kind):
    """A method that makes an optimizer of this kind."""
    return lambda training, start, stop: kind(small.KERNELS, training.layout, start, stop, AdamWSettings(eps=1e-4))


def cases():
    """Those that exchange while the model computes; the others are in tests/unit/test_strategies_in_threads.py."""
    for name, kind in STRATEGIES.items():
        if kind.traits.overlaps:
            yield name, {"bucket_bytes": 400}
        if kind.traits.overlaps and kind.traits.knows_nodes:
            yield name, {"bucket_bytes": 0, "wire": "bfloat16", "error_feedback": True}


def result(comm, sizes, name, options):
    """Bits of all parameters, and of every loss and norm on the way."""
    found, numbers = small.train(small.nodes_of(comm, sizes), name, max_norm=0.3, segment_bytes=1000, **options)
    return found.tobytes(), np.array([[number or 0.0 for number in step] for step in numbers]).tobytes()


@pytest.mark.ranks(2, 3, 4)
def test_late_messages_and_dawdling_ranks_change_no_bit(comm, monkeypatch):
    monkeypatch.setattr(small, "TOKENS", small.TOKENS[:2])
    sizes = NODES[comm.size]
    for number, (name, options) in enumerate(cases()):
        slow = number % comm.size == comm.rank
        expected = result(comm, sizes, name, options)
        late = Late(100 * number + comm.rank, 25 if slow else 3)
        with monkeypatch.context() as patch:
            patch.setattr(small.Training, "_new_optimizer", makes(Dawdling if slow else AdamW))
            found = result(late_comm(comm, late), sizes, name, options)
        assert found == expected, f"{name} {options}"
        late.check_all_were_waited_for()


@pytest.mark.ranks(2)
def test_nothing_is_there_before_its_wait(comm):
    """And a communicator that is split off or duplicated is as late."""
    late, other = Late(comm.rank, 3), 1 - comm.rank
    mpi = late_comm(comm, late).Split(0, comm.rank).Dup()
    sent, received, gathered = np.full(9, 5.0), np.zeros(9), np.zeros(18)
    arrival, leaving = mpi.Irecv(received, other, 5), mpi.Isend(sent, other, 5)
    gathering = mpi.Iallgather(sent, gathered)
    assert np.isnan(received).all()
    assert np.isnan(gathered).all()
    with pytest.raises(AssertionError, match="never waited for: receive from"):
        late.check_all_were_waited_for()
    for request in (gathering, arrival, leaving, mpi.Ibarrier()):
        wait(request)
    late.check_all_were_waited_for()
    assert (received == 5).all()
    assert (gathered == 5).all()
    with pytest.raises(AssertionError, match="Ialltoall is not late"):
        mpi.Ialltoall(sent, gathered)
