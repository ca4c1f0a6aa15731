"""Stages that are threads, over an MPI that delivers late: a wait left out, or a buffer used too soon, shows."""

import numpy as np
import pytest

from dist.stage_links import StageLinks
from tests.ranks.test_stage_links import SCHEDULES, SHAPE, actions_of, no_phase, run_step
from tests.support.thread_ranks import run_ranks


@SCHEDULES
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_rows_come_in_order_however_late(schedule, stages, seed):
    def program(world):
        links = StageLinks(world, SHAPE, no_phase)
        for step in range(2):
            run_step(links, actions_of(schedule, links.stage, stages, 6), SHAPE, step)

    run_ranks([stages], program, seed=seed, most=6, slow=seed % stages)


@pytest.mark.parametrize("seed", range(4))
def test_the_head_comes_however_late(seed):
    def program(world):
        links, wte, came = (
            StageLinks(world, SHAPE, no_phase),
            np.arange(12.0, dtype=np.float32),
            np.zeros(12, np.float32),
        )
        if world.rank == 0:
            links.send_head(wte)
            links.receive_head(came)
        else:
            links.receive_head(came)
            links.wait_for_head()
            links.send_head(2 * wte)
        if world.rank == 0:
            links.wait_for_head()
        links.finish()
        return came.tolist()

    first, last = run_ranks([2], program, seed=seed, most=20, slow=seed % 2)
    assert last == list(range(12))
    assert first == [2.0 * number for number in range(12)]
