"""The replay of messages: seconds by hand, and ranks that are in different calls at once."""

import numpy as np
import pytest

from dist.cost.ports import Links, PortShares
from dist.cost.replay import replay_seconds
from dist.cost.stages import stage

MB = 1_000_000
RATE = 100 * MB


def links(nodes, **changes):
    ports = np.full(max(nodes) + 1, 1 / RATE)
    parts = {"latency_s": 0.0, "local_s": 0.0, "local_added_s": 0.0, "add_s": 0.0, "rendezvous_bytes": 0}
    parts |= {"queue_bytes": MB, "one_connection": True} | changes
    return Links(np.array(nodes), ports, ports, **parts)


def test_ranks_that_are_done_begin_the_next_call():
    """0 -> 1 and then 2 -> 3: nobody waits for the others' stage, so both take one message's time."""
    stages = [stage([0], [1], MB), stage([2], [3], MB)]
    assert replay_seconds(stages, links([0, 1, 2, 3])) == pytest.approx(0.01)
    assert replay_seconds([stages[0], stage([1], [2], MB)], links([0, 1, 2])) == pytest.approx(0.02)


def test_large_messages_wait_for_their_receiver_and_small_ones_do_not():
    """0 sends to 1, which is busy with 2 for 20 ms, and then to 3."""
    stages = [stage([2], [1], 2 * MB), stage([0], [1], MB), stage([0], [3], MB)]
    assert replay_seconds(stages, links([0, 1, 2, 3])) == pytest.approx(0.04)
    eager = links([0, 1, 2, 3], rendezvous_bytes=10 * MB)
    # Both leave at once; into node 1 come 2 and 1 MB.
    assert replay_seconds(stages, eager) == pytest.approx(0.03)


def test_pairs_out_of_step_use_one_direction_at_a_time():
    swap = stage([0, 1], [1, 0], MB)
    late = stage([2], [1], MB)
    assert replay_seconds([swap], links([0, 1])) == pytest.approx(0.01)
    assert replay_seconds([late, swap], links([0, 1, 2])) == pytest.approx(0.03)
    assert replay_seconds([late, swap], links([0, 1, 2], one_connection=False)) == pytest.approx(0.02)
    assert replay_seconds([stage([0, 1], [1, 0], MB, exchange_apart=True)], links([0, 1])) == pytest.approx(0.02)


def test_adding_latency_and_memory():
    """Two dependent messages: each its latency, its way and its addition; inside a node the memory's rate."""
    sums = [stage([0], [1], MB, added=MB), stage([1], [2], MB, added=MB)]
    assert replay_seconds(sums, links([0, 1, 2], latency_s=1e-3, add_s=2e-9)) == pytest.approx(2 * (0.01 + 1e-3 + 2e-3))
    assert replay_seconds(sums, links([0, 0, 0], local_added_s=3e-9)) == pytest.approx(6e-3)


@pytest.mark.parametrize(("queue_bytes", "first_ends"), [(4 * MB, 0.02), (MB, 0.03), (MB / 4, 0.0375)])
def test_a_port_serves_what_came_first_as_far_as_its_queue_goes(queue_bytes, first_ends):
    """Two messages of 2 MB into one port."""
    shares = PortShares(np.full(3, 1 / RATE), np.full(3, 1 / RATE), queue_bytes)
    for name, source in (("first", 1), ("second", 2)):
        shares.add(name, 2 * MB, source, 0)
    ends, now = {}, 0.0
    while shares.moving:
        seconds = shares.seconds_to_next_end()
        now += seconds
        ends |= dict.fromkeys(shares.advance(seconds), now)
    assert ends == pytest.approx({"first": first_ends, "second": 0.04})


def test_all_bytes_take_their_time_whatever_the_order():
    """Random messages: never shorter than the busiest port, and done in the end."""
    random = np.random.default_rng(0)
    nodes = [0, 0, 1, 2, 2, 2, 3]
    for _ in range(20):
        pairs = np.array([random.permutation(7)[:2] for _ in range(30)])
        sizes = random.integers(1, 5 * MB, 30)
        stages = [stage([a], [b], size) for (a, b), size in zip(pairs, sizes, strict=True)]
        place = np.array(nodes)[pairs]
        crossing = place[:, 0] != place[:, 1]
        busiest = max(np.bincount(place[crossing, way], sizes[crossing]).max() for way in (0, 1)) / RATE
        for eager in (0, 10 * MB):
            seconds = replay_seconds(stages, links(nodes, rendezvous_bytes=eager))
            assert busiest <= seconds * (1 + 1e-9)
            assert seconds <= sizes.sum() / RATE
