"""The run folder's lock on several ranks: all end where it is refused, lost, or not seen by a node."""

import re
import threading
from dataclasses import replace

import pytest

from dist.world import start_world, world_of
from gpt2.formats import checkpoint_files
from scripts.training import run_lock
from scripts.training.lock_file import LOCK, look, own_lock
from scripts.training.run_lock import RunLock
from tests.support.in_process import train

TRAINING = (
    "--n-layer", 1, "--n-head", 1, "--n-embd", 8, "--context", 8, "--batch-size", 1, "--steps", 4,
    "--checkpoint-every", 2, "--eval-every", 0, "--trace", "off",
)  # fmt: skip


@pytest.mark.ranks(1, 2)
def test_all_ranks_know_the_number_and_the_end_leaves_nothing(comm, shared_path):
    world = start_world()
    with RunLock(world) as lock:
        lock.take(shared_path / "run", False)
        assert set(comm.allgather(lock.run)) == {look(shared_path / "run" / LOCK).run}
        lock.check()
        comm.Barrier()
    comm.Barrier()
    assert not (shared_path / "run").exists()
    comm.Barrier()


@pytest.mark.ranks(2)
def test_a_refusal_ends_all_ranks(comm, shared_path, capsys):
    world = start_world()
    with RunLock(world) as holder:
        holder.take(shared_path, False)
        with pytest.raises(SystemExit) as ended, RunLock(world) as other:
            other.take(shared_path, False)
        assert ended.value.code == 2
        assert comm.rank or "error: " in (said := capsys.readouterr().err)
        assert comm.rank or (said.count("\n") == 1 and "the run is being trained by process" in said)
        holder.check()
        comm.Barrier()
    comm.Barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["taken over", "removed", "the folder is gone", "the heartbeat notices"])
def test_who_loses_it_ends_before_it_writes(comm, shared_path, monkeypatch, how):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05 if how == "the heartbeat notices" else 1000)
    world, said, told = start_world(), [], threading.Event()

    def end(comm, text, code):
        said.append((text, code))
        told.set()
        raise SystemExit(code)

    lock = RunLock(world, end)
    lock.take(shared_path / "run", False)
    comm.Barrier()
    if comm.rank == 0:
        path = shared_path / "run" / LOCK
        other = replace(own_lock(), host="elsewhere")
        if how in ("taken over", "the heartbeat notices"):
            (path.parent / "new").write_bytes(other.content())
            (path.parent / "new").rename(path)
        elif how == "removed":
            path.unlink()
        else:
            path.parent.rename(shared_path / "moved")
        if how == "the heartbeat notices":
            assert told.wait(60)
        else:
            with pytest.raises(SystemExit):
                lock.check()
        [(text, code)] = said
        assert code == 2
        assert text.count("\n") == 1
        where = (
            "it is gone, somebody removed it" if how in ("removed", "the folder is gone") else "on elsewhere, started"
        )
        assert where in text
        lock.__exit__()
        assert path.exists() == ("over" in how or "heartbeat" in how), "the other's lock stays"
    else:
        lock.check()
    comm.Barrier()


@pytest.mark.ranks(3)
def test_nodes_that_do_not_share_the_folder_are_named(comm, shared_path, monkeypatch, capsys):
    """Two nodes, of which the second has another folder at the same path; and one that sees the file late."""
    world = world_of(comm, comm.Split(min(comm.rank, 1), comm.rank))
    monkeypatch.setattr(run_lock, "SEEN_WITHIN_S", 0.3)
    folder = shared_path / ("own" if world.node else "run")
    with pytest.raises(SystemExit) as ended, RunLock(world) as lock:
        lock.take(folder, False)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert comm.rank or (said.count("\n") == 1 and f"not seen on {world.host} within" in said)
    comm.Barrier()
    assert not list(shared_path.iterdir())
    comm.Barrier()
    if world.node:  # what a node's cache still has of an earlier start
        folder.mkdir(exist_ok=True)
        (folder / LOCK).write_bytes(own_lock().content())
    with pytest.raises(SystemExit), RunLock(world) as lock:
        lock.take(folder, False)
    monkeypatch.setattr(run_lock, "SEEN_WITHIN_S", 60)
    comm.Barrier()
    if world.node and world.local_rank == 0:
        shown = threading.Timer(0.5, lambda: (folder / LOCK).write_bytes((shared_path / "run" / LOCK).read_bytes()))
        shown.start()
    with RunLock(world) as lock:
        lock.take(folder, False)
        assert lock.run
        comm.Barrier()


@pytest.mark.ranks(2)
def test_a_part_of_another_job_makes_no_checkpoint(comm, shared_path, monkeypatch, capsys):
    """It is said for each checkpoint, and the run ends with code 2, as its last one could not be written."""
    write_part = checkpoint_files.write_part

    def of_another_job(folder, step, rank, ranges, run):
        return write_part(folder, step, rank, ranges, "f" * 32 if rank == 1 else run)

    monkeypatch.setattr(checkpoint_files, "write_part", of_another_job)
    with pytest.raises(SystemExit) as ended:
        train(start_world(), shared_path / "run", *TRAINING)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert comm.rank or re.search(r"rank 0 on \S+: the checkpoint of step 4 was not written: .*rank-00001.*f{32}", said)
    comm.Barrier()
    assert list((shared_path / "run" / "checkpoints").iterdir()) == []
