"""dist/watch/stalls.py: whom the positions of all ranks accuse, and whom they do not, though they seem to."""

import numpy as np
import pytest

from dist.watch.live import LEFT, POSITION
from dist.watch.stalls import STANDING_BYTES_S, Observation

PHASES = ["none", "backward", "reduce", "recv"]
IS_MEETING = np.array([False, False, True, False])
IS_WAIT = np.array([False, False, False, True])
WAITS, COMPUTES, RECEIVES = "reduce", "backward", "recv"


def seen(*rows) -> np.ndarray:
    """Ranks by (step, meetings, phase)."""
    positions = np.zeros(len(rows), POSITION)
    positions["rank"] = np.arange(len(rows))
    for position, (step, meetings, phase) in zip(positions, rows, strict=True):
        position["step"], position["meetings"], position["phase"] = step, meetings, PHASES.index(phase)
    return positions


def watched(positions, seconds=100, silent=(), bytes_s=0, every=1.0) -> Observation:
    """After so many seconds without a change. bytes_s: through each rank's node's ports."""
    observation = Observation(IS_MEETING, 60, 2, IS_WAIT)
    for look in range(round(seconds / every)):
        positions["pulse"] += 1
        positions["pulse"][list(silent)] = 0
        positions["moved"] += np.asarray(bytes_s, int) + (10**7 if look == 1 else 0)
        observation.look(positions, look * every)
    return observation


def test_the_one_that_has_come_least_far_is_named():
    positions = seen((17, 1, WAITS), (17, 2, WAITS), (17, 0, COMPUTES), (17, 1, WAITS))
    positions["pid"] = 1000 + positions["rank"]
    stall = watched(positions).find_stall()
    assert (stall.ranks, stall.step, PHASES[stall.phase], stall.pid) == ([2], 17, COMPUTES, 1002)
    assert (stall.waiting, PHASES[stall.waiting_phase], stall.is_silent) == (3, WAITS, False)
    assert stall.waiting_s == 99


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(17, 1, WAITS), (17, 1, WAITS)], "all have come: the exchange itself is slow"),
        ([(17, 0, COMPUTES), (17, 0, COMPUTES)], "nobody waits"),
        ([(17, 1, "none"), (17, 0, COMPUTES)], "who has left the exchange does not wait in it"),
        ([(17, 1, WAITS), (LEFT, 0, "none")], "who has ended comes nowhere"),
    ],
)
def test_nobody_is_named(rows, why):
    assert watched(seen(*rows)).find_stall() is None, why


def test_nobody_is_named_too_early():
    for seconds, is_named in ((60, False), (62, True)):
        stall = watched(seen((17, 1, WAITS), (17, 0, COMPUTES)), seconds).find_stall()
        assert (stall is not None) == is_named


def test_a_node_that_is_seen_late_or_no_more():
    """The first look may lack it; one whose file cannot be read any more is silent."""
    everyone = seen((17, 1, WAITS), (17, 1, WAITS))
    observation = Observation(IS_MEETING, 60, 2)
    observation.look(everyone[:1], 0)
    observation.look(everyone, 1)
    for second in range(2, 100):
        everyone["pulse"] += 1
        observation.look(everyone[:1], second)
    stall = observation.find_stall()
    assert (stall.ranks, stall.is_silent, stall.waiting) == ([1], True, 1)


def test_a_node_without_a_link_is_named():
    """All wait in the exchange, one of them behind another; the cable of the third is out."""
    positions = seen((17, 1, WAITS), (17, 2, WAITS), (17, 2, WAITS))
    assert watched(positions.copy()).find_stall().ranks == [0]
    positions["cut_off"][2] = 1
    stall = watched(positions).find_stall()
    assert (stall.ranks, stall.is_cut_off, stall.waiting) == ([2], True, 2)


def test_a_network_that_stands_still_is_no_slow_exchange():
    rows = [(17, 1, WAITS)] * 3
    little = STANDING_BYTES_S / 2
    much = 2 * STANDING_BYTES_S
    stall = watched(seen(*rows)).find_standstill()
    assert (stall.ranks, stall.waiting, PHASES[stall.phase]) == ([], 3, WAITS)
    assert watched(seen(*rows), bytes_s=[little] * 3).find_standstill() is not None
    assert watched(seen(*rows), bytes_s=[little, little, much]).find_standstill() is None
    assert watched(seen(*rows), seconds=60).find_standstill() is None
    for other in ((17, 0, COMPUTES), (17, 2, WAITS)):
        assert watched(seen(*rows[:2], other)).find_standstill() is None


def test_who_moves_on_is_long_by_design_and_who_hangs_beside_it_is_named():
    """A server waits for workers in a long validation; each batch of theirs is a change."""
    observation = Observation(IS_MEETING, 60, 2)
    positions = seen((17, 1, WAITS), (17, 0, COMPUTES), (17, 0, COMPUTES))
    for second in range(100):
        positions["pulse"] += 1
        positions["changes"][1] += second % 30 == 0
        positions["changes"][2] += second % 30 == 0 and second < 30
        observation.look(positions, second)
        assert (observation.find_stall() is not None) == (second >= 60)
    assert observation.find_stall().ranks == [2]


def test_what_was_suspended_together_has_not_waited():
    """Ten minutes passed between two looks, and then all threads ran again."""
    observation, positions = Observation(IS_MEETING, 60, 2), seen((17, 1, WAITS), (17, 0, COMPUTES))
    observation.look(positions, 0)
    positions["pulse"] += 1
    observation.look(positions, 600)
    assert observation.find_stall() is None


def test_a_rank_that_shows_no_life_comes_before_one_that_is_cut_off():
    positions = seen((17, 2, WAITS), (17, 1, WAITS), (17, 2, WAITS))
    positions["cut_off"][2] = 1
    assert watched(positions, silent=[0]).find_stall().ranks == [0]


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


# --- ranks that wait for some others: stages of a pipeline ---


def test_the_stage_that_computes_holds_up_those_that_wait_for_it():
    """Nobody is behind: stages meet in nothing but the step's end."""
    stall = watched(seen((17, 0, RECEIVES), (17, 0, COMPUTES), (17, 0, RECEIVES))).find_stall()
    assert (stall.ranks, PHASES[stall.phase]) == ([1], COMPUTES)
    assert (stall.waiting, PHASES[stall.waiting_phase], stall.waiting_s) == (2, RECEIVES, 99)


def test_a_stage_that_waits_is_not_the_one_that_is_behind():
    """One copy has come to the step's end; of the other one, a stage computes, and the next one waits for it."""
    assert watched(seen((17, 1, WAITS), (17, 0, COMPUTES), (17, 0, RECEIVES))).find_stall().ranks == [1]


def test_stages_that_all_wait_accuse_nobody():
    assert watched(seen((17, 0, RECEIVES), (17, 0, RECEIVES))).find_stall() is None


def test_who_has_come_further_holds_no_stage_up():
    assert watched(seen((17, 0, RECEIVES), (18, 0, COMPUTES))).find_stall() is None


def test_a_stage_that_waits_for_its_messages_to_be_taken_comes_second():
    """It is in no phase then."""
    assert watched(seen((17, 0, "none"), (17, 0, COMPUTES), (17, 0, RECEIVES))).find_stall().ranks == [1]
    assert watched(seen((17, 0, "none"), (17, 0, RECEIVES))).find_stall().ranks == [0]
    assert watched(seen((17, 1, WAITS), (17, 0, "none"), (17, 0, COMPUTES))).find_stall().ranks == [2]


def test_a_stage_that_moves_on_is_slow_and_no_stall():
    observation, positions = Observation(IS_MEETING, 60, 2, IS_WAIT), seen((17, 0, RECEIVES), (17, 0, COMPUTES))
    for second in range(100):
        positions["pulse"] += 1
        positions["changes"][1] = second // 30
        observation.look(positions, second)
    assert observation.find_stall() is None


def test_without_stages_a_rank_that_computes_is_nobodys_hindrance():
    """It has left the exchange that the others are in: they wait for the network, or for each other."""
    assert watched(seen((17, 1, WAITS), (17, 1, COMPUTES))).find_stall() is None


def test_stages_that_wait_while_no_port_carries_anything():
    positions = seen((17, 0, RECEIVES), (17, 0, RECEIVES), (17, 1, WAITS))
    assert watched(positions).find_standstill().ranks == []
    assert watched(seen((17, 0, RECEIVES), (17, 0, COMPUTES))).find_standstill() is None
    assert watched(seen((17, 0, WAITS), (17, 1, WAITS))).find_standstill() is None
    assert watched(seen((17, 0, RECEIVES), (18, 0, RECEIVES))).find_standstill() is None


def asked(positions, *ranks) -> np.ndarray:
    positions["asked"][list(ranks)] = 1
    return positions


def test_who_shows_no_life_and_was_not_asked_for_the_end_is_gone_once_all_others_were_and_wait():
    rows = [(17, 2, WAITS), (17, 1, COMPUTES), (17, 1, RECEIVES), (LEFT, 0, "none")]
    assert watched(asked(seen(*rows), 0, 2), silent=[1]).find_gone() == [1]
    assert watched(asked(seen(*rows), 0, 2), silent=[1], seconds=50).find_gone() == []
    assert watched(asked(seen(*rows), 0, 2)).find_gone() == [], "it lives"


def test_nobody_is_gone_while_the_wish_for_the_end_may_still_be_met():
    rows = [(17, 2, WAITS), (17, 1, WAITS), (17, 2, WAITS)]
    assert watched(asked(seen(*rows), 0), silent=[1]).find_gone() == [], "rank 2 was not asked, so not all were"
    assert watched(asked(seen(*rows), 0, 1, 2), silent=[1]).find_gone() == [], "it was asked, and may do it"
    rows[2] = (17, 1, COMPUTES)
    assert watched(asked(seen(*rows), 0, 2), silent=[1]).find_gone() == [], "rank 2 does not wait yet"
    assert watched(seen((17, 1, WAITS), (17, 1, WAITS)), silent=[0, 1]).find_gone() == [], "nobody is left"
