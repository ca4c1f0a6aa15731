"""Each rank's position, as others read it while it hangs."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from dist.watch.live import LEFT, POSITION, LivePositions
from dist.world import world_of

PHASES, MEETINGS = ("forward", "allreduce", "wait"), ("allreduce", "wait")


@contextmanager
def positions(comm, folder):
    live = LivePositions(world_of(comm, comm), folder, PHASES, MEETINGS)
    yield live
    live.close()


def own(live, *names):
    (position,) = live.node_positions()
    return tuple(int(position[name]) for name in names)


@pytest.mark.ranks(1)
def test_a_position_says_how_far_a_rank_has_come(comm, tmp_path):
    """Meetings count within a step, changes over all."""
    with positions(comm, tmp_path) as live:
        for step in (1, 2):
            for phase in ("forward", "allreduce", "wait"):
                live.enter(phase, step)
                assert own(live, "step", "phase") == (step, 1 + PHASES.index(phase))
                live.enter(None, step)
                assert own(live, "phase") == (0,)
            assert own(live, "meetings", "changes") == (2, 6 * step)
        live.enter("forward", 3)
        assert own(live, "step", "meetings", "changes") == (3, 0, 13)
        live.leave()
        assert own(live, "step") == (LEFT,)


@pytest.mark.ranks(1)
def test_a_pulse_counts_what_passes_both_ways(comm, tmp_path):
    with positions(comm, tmp_path) as live:
        live._ports = SimpleNamespace(read=lambda: (300, 50), has_lost_link=lambda: True)
        live.pulse()
        live.pulse()
        assert own(live, "pulse", "moved", "cut_off") == (2, 350, 1)


@pytest.mark.ranks(1)
def test_of_another_node_whole_records_of_this_run_count(comm, tmp_path):
    """An earlier run may have left its file, and a file may be read while it is written."""
    with positions(comm, tmp_path) as live:
        written = np.zeros(3, POSITION)
        written["rank"], written["run"] = [2, 3, 4], [live._run, live._run - 1, live._run]
        file = tmp_path / "node-00001.live"
        file.write_bytes(written.tobytes())
        assert live.read([1])["rank"].tolist() == [0, 2, 4]
        file.write_bytes(written.tobytes()[:-5])
        assert live.read([0, 1])["rank"].tolist() == [0, 2]
        assert live.read([2])["rank"].tolist() == [0]
