"""The groups of a mesh, on one node and on several, and that each of them speaks and ends as the whole job."""

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from dist import shared_memory
from dist.buffers import NodeBuffers
from dist.mesh import make_mesh
from dist.mpi import MPI
from dist.shard_sums import RingSums, SharedMemorySums, new_shard_sums
from dist.waiting import wait
from dist.world import world_of
from gpt2.config import GPT2Config
from scripts.settings.model_parallel import ModelCut
from scripts.training.shared_model import SharedModel
from tests.ranks.test_shard_sums import check_sum, no_phase, values

GROUPS = ("data_world", "model_world", "shards_world", "stages_world")


def members(mesh, comm):
    """The job's ranks of each group, in its order."""
    return {name: getattr(mesh, name).comm.allgather(comm.rank) for name in GROUPS}


@pytest.mark.ranks(4)
def test_groups_on_one_node(comm):
    world = world_of(comm, comm.Split(0, comm.rank))
    mesh = make_mesh(world, 2, 2)
    part, stage = comm.rank % 2, comm.rank // 2
    assert (mesh.shard, mesh.replica, mesh.stage, mesh.data) == (part, 0, stage, 1)
    assert members(mesh, comm) == {
        "data_world": [comm.rank], "model_world": [0, 1, 2, 3],
        "shards_world": [2 * stage, 2 * stage + 1], "stages_world": [part, part + 2],
    }  # fmt: skip
    assert mesh.shards_world.local_size == 2
    assert not mesh.spans_nodes
    assert mesh.coordinates[comm.rank] == {"rank": comm.rank, "copy": 0, "part": part, "stage": stage}


@pytest.mark.ranks(4)
def test_groups_on_two_nodes_that_ranks_are_dealt_to_in_turn(comm):
    """Ranks 0 and 2 are on one node: they are the parts of a copy. Three parts of four ranks would not do."""
    world = world_of(comm, comm.Split(comm.rank % 2, comm.rank))
    mesh = make_mesh(world, 2, 1)
    node = comm.rank % 2
    assert (mesh.shard, mesh.replica, mesh.stage) == (comm.rank // 2, node, 0)
    assert members(mesh, comm)["shards_world"] == [node, node + 2]
    assert members(mesh, comm)["data_world"] == [comm.rank - node, comm.rank - node + 1]
    assert (mesh.shards_world.node_count, mesh.data_world.node_count) == (1, 2)
    assert not mesh.spans_nodes
    mesh = make_mesh(world, 1, 4)
    assert members(mesh, comm)["stages_world"] == [0, 2, 1, 3]
    assert [mesh.stage, mesh.stages_world.rank] == [[0, 2, 1, 3].index(comm.rank)] * 2
    mesh = make_mesh(world, 4, 1)
    assert mesh.spans_nodes


@pytest.mark.ranks(4)
def test_groups_of_one_job_may_sum_by_different_means(comm):
    """Nodes of 3 ranks and of 1: the parts of one group share a memory, those of the other do not."""
    mesh = make_mesh(world_of(comm, comm.Split(comm.rank // 3, comm.rank)), 2, 1)
    assert mesh.spans_nodes
    parts = new_shard_sums(mesh.shards_world, 35, no_phase)
    assert type(parts) is (SharedMemorySums if mesh.replica == 0 else RingSums)
    check_sum(mesh.shards_world.comm, parts.sum(values(mesh.shard, (5, 7))), (5, 7))
    parts.close()


@pytest.mark.ranks(3)
def test_without_parts_and_stages_copies_are_the_job(comm):
    world = world_of(comm, comm.Split(comm.rank % 2, comm.rank))
    mesh = make_mesh(world, 1, 1)
    assert mesh.data_world is world
    assert (mesh.replica, mesh.data) == (comm.rank, 3)


@pytest.mark.ranks(2)
def test_a_run_gives_its_communicators_back(comm):
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, context=4, vocab_size=20)
    with ExitStack() as resources:
        cut = ModelCut(tensor=2, pipeline=1, layers=(1,), schedule="1f1b", micro_steps=1)
        mesh = SharedModel(cut, config, world_of(comm, comm.Split(0, comm.rank)), resources).mesh
    for world in (getattr(mesh, name) for name in GROUPS):
        assert world.comm == world.local_comm == MPI.COMM_NULL


@pytest.mark.ranks(4)
def test_a_mistake_in_one_group_ends_all(comm, capsys):
    """Of rank 3, in a group that rank 0 is not in: rank 0 tells, and names rank 3."""
    mesh = make_mesh(world_of(comm, comm.Split(0, comm.rank)), 2, 2)
    for name in GROUPS:
        with pytest.raises(SystemExit) as ended:
            fail_together(getattr(mesh, name), fails=comm.rank == 3)
        assert ended.value.code == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: no such file (rank 3 on ") if comm.rank == 0 else not printed
        getattr(mesh, name).print("once")
        assert capsys.readouterr().out == ("once\n" if comm.rank == 0 else "")


def fail_together(world, fails):
    with world.together(ValueError):
        if fails:
            raise ValueError("no such file")


@pytest.mark.ranks(4)
def test_memory_of_all_groups_of_a_node_adds_up(comm, monkeypatch, capsys):
    """Two groups of two ranks, of 1000 and of 500 elements: three vectors each, 18,000 bytes, not one less."""
    mesh = make_mesh(world_of(comm, comm.Split(0, comm.rank)), 1, 2)
    size = 1000 if mesh.stage == 0 else 500
    for free in (18_000, 17_999):
        monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder, n=free: SimpleNamespace(f_bavail=n, f_frsize=1))
        if free == 18_000:
            buffers = NodeBuffers(mesh.data_world, size)
            buffers.gradients[:] = comm.rank
            buffers.arrive()
            wait(buffers.arrived(range(2), 1))
            assert np.array_equal([flat[0] for flat in buffers.local_gradients], [2 * mesh.stage, 2 * mesh.stage + 1])
            buffers.close()
        else:
            with pytest.raises(SystemExit):
                NodeBuffers(mesh.data_world, size)
            assert ("for the buffers that its ranks share" in capsys.readouterr().err) == (comm.rank == 0)


@pytest.mark.ranks(4)
def test_too_little_memory_for_the_sums_of_one_group_ends_all(comm, monkeypatch, capsys):
    """Nodes of 2 ranks; the second has room for nothing."""
    mesh = make_mesh(world_of(comm, comm.Split(comm.rank // 2, comm.rank)), 2, 1)
    free = 1 << 30 if comm.rank < 2 else 1
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: SimpleNamespace(f_bavail=free, f_frsize=1))
    with pytest.raises(SystemExit):
        new_shard_sums(mesh.shards_world, 35, no_phase)
    assert ("MB for the sums over parts of tensors" in capsys.readouterr().err) == (comm.rank == 0)
