"""dist/watch/stalls.py: whom the positions of all ranks accuse, and whom they do not, though they seem to."""

import numpy as np

from dist.watch.live import LEFT, POSITION
from dist.watch.stalls import STANDING_BYTES_S, Observation

PHASES = ["none", "backward", "reduce"]
IS_MEETING = np.array([False, False, True])
WAITS, COMPUTES = "reduce", "backward"


def seen(*rows) -> np.ndarray:
    """Ranks by (step, meetings, phase)."""
    positions = np.zeros(len(rows), POSITION)
    positions["rank"] = np.arange(len(rows))
    for position, (step, meetings, phase) in zip(positions, rows, strict=True):
        position["step"], position["meetings"], position["phase"] = step, meetings, PHASES.index(phase)
    return positions


def watched(positions, seconds=100, silent=(), bytes_s=0, every=1.0, in_groups=False) -> Observation:
    """After so many seconds without a change. bytes_s: through each rank's node's ports."""
    observation = Observation(IS_MEETING, 60, 2, in_groups)
    for look in range(round(seconds / every)):
        positions["pulse"] += 1
        positions["pulse"][list(silent)] = 0
        positions["moved"] += np.asarray(bytes_s, int) + (10**7 if look == 1 else 0)
        observation.look(positions, look * every)
    return observation


def test_what_was_suspended_together_has_not_waited():
    """Ten minutes passed between two looks, and then all threads ran again."""
    observation, positions = Observation(IS_MEETING, 60, 2), seen((17, 1, WAITS), (17, 0, COMPUTES))
    observation.look(positions, 0)
    positions["pulse"] += 1
    observation.look(positions, 600)
    assert observation.find_stall() is None


def test_a_rank_that_shows_no_life_comes_before_one_that_is_cut_off():
    positions = seen((17, 2, WAITS), (17, 2, WAITS), (17, 2, WAITS))
    positions["cut_off"][2] = 1
    assert watched(positions, silent=[1]).find_stall().ranks == [1]


def test_who_shows_no_life_waits_for_nobody():
    assert watched(seen((17, 1, WAITS), (17, 0, COMPUTES)), silent=[0]).find_stall() is None


def test_who_has_ended_is_neither_silent_nor_cut_off():
    positions = seen((17, 2, WAITS), (17, 0, COMPUTES), (LEFT, 0, "none"))
    positions["cut_off"][2] = 1
    assert watched(positions, silent=[2]).find_stall().ranks == [1]
    assert watched(seen((17, 2, WAITS), (LEFT, 0, "none")), silent=[1]).find_stall() is None


def test_a_step_is_further_than_any_number_of_meetings():
    assert watched(seen((17, 9, WAITS), (18, 1, WAITS))).find_stall().ranks == [0]


def test_a_rank_is_still_since_its_last_change_whatever_its_ports_carry():
    stall = watched(seen((17, 1, WAITS), (17, 0, COMPUTES)), bytes_s=2 * STANDING_BYTES_S).find_stall()
    assert (stall.ranks, stall.since_s, stall.waiting_s) == ([1], 99, 99)


def test_a_network_that_moves_between_two_looks_does_not_stand_still():
    """However short the time between them is."""
    rows = [(17, 1, WAITS)] * 2
    assert watched(seen(*rows), bytes_s=STANDING_BYTES_S / 5, every=0.1).find_standstill() is None
    assert watched(seen(*rows), bytes_s=STANDING_BYTES_S / 50, every=0.1).find_standstill() is not None


def test_ports_that_never_carried_anything_prove_nothing():
    """Those of one node are not what MPI uses."""
    positions = seen((17, 1, WAITS), (17, 1, WAITS))
    observation = Observation(IS_MEETING, 60, 2)
    for second in range(100):
        positions["pulse"] += 1
        positions["moved"][0] += 10**7 if second == 1 else 0
        observation.look(positions, second)
    assert observation.find_standstill() is None


def test_of_ranks_that_share_a_model_who_waits_for_nobody_is_named():
    """Stage 1 hangs in backward: stage 0 and its copy wait in receives, having met fewer or more times than it."""
    positions = seen((17, 0, WAITS), (17, 0, COMPUTES), (17, 0, WAITS), (17, 0, WAITS))
    assert watched(positions, in_groups=True).find_stall().ranks == [1]
    assert watched(positions).find_stall() is None
    assert watched(seen((17, 0, WAITS), (17, 0, WAITS)), in_groups=True).find_stall() is None
