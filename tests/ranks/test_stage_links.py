"""What stages pass on: in which order it comes, whose buffers it lies in, the head, and large messages both ways."""

import time
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from dist.mesh import make_mesh
from dist.shard_sums import new_shard_sums
from dist.stage_links import DOWN, UP, StageLinks
from dist.world import world_of

SHAPE = (5, 7)
LARGE = (1024, 1536)  # 6 MB
SCHEDULES = pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])


def no_phase(name, bytes, root=None):
    return nullcontext()


def actions_of(schedule, stage, stages, micro_steps):
    """[("forward" or "backward", micro-step), ...]."""
    warm_up = micro_steps if schedule == "gpipe" else min(micro_steps, stages - 1 - stage)
    actions = [("forward", i) for i in range(warm_up)]
    for i in range(micro_steps - warm_up):
        actions += [("forward", warm_up + i), ("backward", i)]
    return actions + [("backward", i) for i in range(micro_steps - warm_up, micro_steps)]


def message(direction, sender, micro_step, step, shape):
    """Every element tells where it belongs."""
    count = int(np.prod(shape))
    return (np.arange(count, dtype=np.float32) + 1000.0 * micro_step + 17.0 * sender + direction + step).reshape(shape)


def run_step(links, actions, shape, step=0, dawdle=lambda: None):
    links.begin(*(sum(kind == name for kind, _ in actions) for name in ("forward", "backward")))
    pass_on(links, actions, shape, step, dawdle)
    links.finish()


def pass_on(links, actions, shape, step=0, dawdle=lambda: None):
    """What each message holds is checked; buffers are spoiled as soon as they may be."""
    is_first, is_last = links.stage == 0, links.stage == links.stages - 1
    rows = np.zeros(shape, np.float32)
    for kind, i in actions:
        direction, source, has_source, has_target = (
            (DOWN, links.stage - 1, not is_first, not is_last)
            if kind == "forward"
            else (UP, links.stage + 1, not is_last, not is_first)
        )
        dawdle()
        if has_source:
            rows[:] = np.nan
            links.receive(direction, rows)
            np.testing.assert_array_equal(rows, message(direction, source, i, step, shape))
        links.progress()
        if has_target:
            rows[:] = message(direction, links.stage, i, step, shape)
            links.send(direction, rows)
            rows[:] = np.nan


def stages_of(comm, shape, **options):
    return StageLinks(world_of(comm.Dup(), comm.Split(0, comm.rank)), shape, no_phase, **options)


@SCHEDULES
@pytest.mark.parametrize(("shape", "lengths"), [(SHAPE, (8, 1, 2, 13)), (LARGE, (6, 6))], ids=["small", "6 MB"])
@pytest.mark.ranks(2, 3)
def test_rows_come_in_the_order_of_micro_steps(comm, schedule, shape, lengths):
    """Also in steps of other lengths, after one another, and while stages dawdle in turns."""
    links, own = stages_of(comm, shape), np.random.default_rng(comm.rank)
    for step, micro_steps in enumerate(lengths):
        actions = actions_of(schedule, links.stage, links.stages, micro_steps)
        run_step(links, actions, shape, step, lambda: time.sleep(own.random() * 2e-3))


@pytest.mark.ranks(2, 3)
def test_forwards_alone(comm):
    """As in a validation; the next step has both ways again."""
    links = stages_of(comm, SHAPE)
    run_step(links, [("forward", i) for i in range(5)], SHAPE, 1)
    run_step(links, actions_of("1f1b", links.stage, links.stages, 3), SHAPE, 2)


@SCHEDULES
@pytest.mark.ranks(2, 3)
def test_six_megabytes_both_ways(comm, schedule):
    links = stages_of(comm, LARGE)
    for step in range(2):
        run_step(links, actions_of(schedule, links.stage, links.stages, 6), LARGE, step)


@pytest.mark.ranks(2, 3)
def test_the_head_is_lent_and_its_gradient_returned(comm):
    """Beside rows that go both ways, and whose receives are posted before, or after."""
    links, count = stages_of(comm, SHAPE), (1 << 21) + 5
    for step in range(3):
        wte, dwte = np.arange(count, dtype=np.float32) + step, np.arange(count, dtype=np.float32) * -1 - step
        borrowed, returned = np.full((count, 1), np.nan, np.float32), np.full(count, np.nan, np.float32)
        is_first, is_last = links.stage == 0, links.stage == links.stages - 1
        if step != 1:
            links.begin(4, 4)
        if is_first:
            links.send_head(wte.reshape(-1, 1))
        if is_last:
            links.receive_head(borrowed)
            links.wait_for_head()
            assert (borrowed[:, 0] == wte).all()
        if is_first:
            links.receive_head(returned)
        if is_last:
            links.send_head(dwte)
        if step == 1:
            links.begin(4, 4)
        pass_on(links, actions_of("1f1b", links.stage, links.stages, 4), SHAPE, step)
        if is_first:
            links.wait_for_head()
            assert (returned == dwte).all()
        links.finish()


@SCHEDULES
@pytest.mark.ranks(4)
def test_each_part_passes_on_its_share(comm, schedule):
    """2 parts x 2 stages: rows are the same on both parts, half of their bytes travel, and all arrive."""
    mesh = make_mesh(world_of(comm, comm.Split(0, comm.rank)), 2, 2)
    seen = []

    @contextmanager
    def phase(name, bytes, root):
        seen.append((name, bytes, root))
        yield

    parts = new_shard_sums(mesh.shards_world, 35, lambda name, bytes: nullcontext())
    links = StageLinks(mesh.stages_world, SHAPE, phase, parts)
    run_step(links, actions_of(schedule, mesh.stage, 2, 3), SHAPE)
    share = 4 * (17 if mesh.shard == 0 else 18)
    assert sorted(seen) == 3 * [("recv", share, comm.rank ^ 2)] + 3 * [("send", share, comm.rank ^ 2)]
    parts.close()


@pytest.mark.ranks(3)
def test_mistakes(comm):
    links = stages_of(comm, SHAPE)
    if comm.rank == 1:
        with pytest.raises(ValueError, match="stage 1 receives more than its step has"):
            links.receive(DOWN, np.zeros(SHAPE, np.float32))
        links.begin(1, 0)
        with pytest.raises(RuntimeError, match="stage 1 ends a step in which it has not received all"):
            links.finish()
    rows = np.ones(SHAPE, np.float32)
    if comm.rank == 0:
        links.begin(1, 0)
        links.send(DOWN, rows)
    if comm.rank == 1:
        links.receive(DOWN, rows)
    links.finish()
