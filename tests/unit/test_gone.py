"""Lookout.gone_ranks: who concludes that a rank is gone, who hears it from another, and whose records are read."""

from types import SimpleNamespace

import numpy as np
import pytest

from dist.watch import stalls
from dist.watch.live import POSITION
from dist.watch.stalls import Lookout, Observation

NODES = [0, 0, 1, 1, 2]  # of each rank
PLACES = [{"rank": rank, "node": node, "local_rank": rank % 2} for rank, node in enumerate(NODES)]
IS_MEETING = np.array([False, True])
SILENT_S = 3.0


def watching(rank, live, silent_s=SILENT_S):
    world = SimpleNamespace(rank=rank, local_rank=rank % 2, node_count=3, places=PLACES)
    return Lookout(world, live, lambda: Observation(IS_MEETING, silent_s, 0.5)).gone_ranks


class Live:
    """Records of five ranks on three nodes, all in a meeting. `silent` neither pulse nor have SIGTERM."""

    def __init__(self, silent=(), unseen=()):
        self.unseen, self.read_nodes, self.published, self.asked = list(unseen), [], 0, 0
        self.positions = np.zeros(len(NODES), POSITION)
        self.positions["rank"], self.positions["phase"] = np.arange(len(NODES)), 1
        self.positions["asked"] = [rank not in silent for rank in range(len(NODES))]

    def read(self, nodes) -> np.ndarray:
        self.read_nodes.append(sorted(nodes))
        return self.positions[np.isin(NODES, list(nodes))].copy()

    def pulse(self, is_asked):
        self.asked += is_asked

    def publish(self):
        self.published += 1


@pytest.fixture
def look(monkeypatch):
    """look(rank, live, seconds): what the rank's last look says, four a second."""

    def look(rank, live, seconds=SILENT_S + 1):
        one = watching(rank, live)
        counted, ticks = live.published, round(4 * seconds) + 1
        for tick in range(ticks):
            monkeypatch.setattr(stalls.time, "monotonic", lambda now=tick / 4: now)
            live.positions["pulse"] += live.positions["asked"]
            said = one()
        assert live.asked == live.published == counted + ticks
        return said

    return look


def test_rank_0_concludes_it_and_not_before_the_time_is_over(look):
    assert look(0, Live(silent=[3])) == [3]
    assert look(0, Live(silent=[3, 4])) == [3, 4]
    assert look(0, Live(silent=[3]), SILENT_S - 0.5) is None
    assert look(0, Live()) is None


def test_the_next_one_does_where_those_before_it_are_gone(look):
    assert look(1, Live(silent=[3])) is None
    assert look(1, Live(silent=[0])) == [0]
    assert look(2, Live(silent=[0, 1]), 2 * SILENT_S + 1) == [0, 1]
    assert look(4, Live(silent=[0, 1]), 2 * SILENT_S + 1) is None, "rank 2 does"
    assert look(3, Live(silent=[0, 1]), 2 * SILENT_S + 1) is None, "the leader of its node does"


def test_others_hear_it_by_the_mark_in_the_first_nodes_records_and_read_no_others(look):
    live = Live(silent=[4])
    assert look(3, live) is None
    live.positions["ends"][0] = 1
    assert look(3, live, 0) == []
    assert look(4, live, 0) == []
    assert look(4, others := Live(silent=[3])) is None
    assert {*map(tuple, live.read_nodes + others.read_nodes)} == {(0,)}


def test_a_leader_hears_it_from_any_node_where_the_first_two_ranks_are_gone(look):
    live = Live(silent=[0, 1])
    live.positions["ends"][2] = 1
    assert look(4, live) == []
    assert look(4, Live(silent=[0]), 1) is None


def test_where_hosts_are_not_seen_nothing_is_concluded():
    one = watching(0, Live(silent=[3], unseen=["cn07"]), silent_s=0.0)
    assert [one() for _ in range(3)] == [None] * 3
