"""Runs of scripts/train.py with --strategy diloco: what is validated and saved, and how other replicas resume."""

import numpy as np
import pytest

from dist.world import world_of
from gpt2.formats.checkpoints import Checkpoint
from tests.ranks.test_resume import Runs
from tests.support.in_process import log

DILOCO = ["--strategy", "diloco", "--replica", "rank", "--outer-lr", 0.5, "--outer-momentum", 0.8]


@pytest.fixture
def runs(comm, shared_path):
    return None if comm is None else Runs(comm, shared_path)


def arrays(runs, out, step, *names):
    """Arrays of a checkpoint, whole."""
    checkpoint = Checkpoint(runs.folder / out / "checkpoints" / f"step-{step:08d}")
    found = [np.empty(checkpoint.facts["count"], np.float32) for _ in names]
    for name, values in zip(names, found, strict=True):
        checkpoint.read(name, 0, values)
    return found


@pytest.mark.ranks(2)
def test_validation_reads_the_global_parameters_and_changes_no_step(comm, runs):
    """They change at step 4 of 6, and the replicas go on with their own."""
    watched = ["--eval-every", 1, "--check-replicas", 1]
    runs.run("plain", *DILOCO, "--local-steps", 4)
    runs.run("watched", *DILOCO, "--local-steps", 4, *watched)
    plain, seen = (log(runs.folder / out) for out in ("plain", "watched"))
    assert [line["loss"] for line in seen] == [line["loss"] for line in plain]
    validated = [line["val_loss"] for line in seen]
    assert len(set(validated[:3])) == len(set(validated[3:])) == 1
    assert validated[3] != validated[2]
    assert validated[-1] == plain[-1]["val_loss"]
    assert runs.result("plain")[1] == runs.result("watched")[1]
    saved, own = arrays(runs, "plain", 6, "parameters", "replica_1_of_2_parameters")
    np.testing.assert_array_equal(runs.result("plain")[2][: len(saved)], saved)
    assert (own != saved).any()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("fragments", [1, 2])
def test_other_replicas_begin_at_the_global_parameters(comm, runs, capsys, fragments):
    """They keep the velocity: at a learning rate of 0 it alone moves the parameters, at steps 4 and 6."""
    flags = [*DILOCO, "--local-steps", 2, "--fragments", fragments]
    runs.run("run", *flags)
    runs.interrupted("run", "resumed")
    pair = comm.Split(0 if comm.rank < 2 else 1, comm.rank)
    if comm.rank < 2:
        capsys.readouterr()
        stop = ["--lr", 0, "--min-lr", 0, "--resume"]
        runs.run("resumed", *flags, *stop, world=world_of(pair, pair.Split(0, pair.rank)))
        printed = capsys.readouterr().out
        assert comm.rank or "has no replica_0_of_2_history: it begins anew" in printed
    comm.Barrier()
    expected, velocity = arrays(runs, "run", 3, "parameters", "velocity")
    assert np.abs(velocity).max() > 1e-4
    found, final_velocity = arrays(runs, "resumed", 6, "parameters", "velocity")
    if fragments == 1:
        for _ in range(2):
            velocity *= 0.8
            expected -= 0.5 * 0.8 * velocity
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
        np.testing.assert_allclose(final_velocity, velocity, rtol=0, atol=1e-7)
    else:
        assert np.abs(found - expected).max() < np.abs(velocity).max()


@pytest.mark.ranks(4)
def test_nodes_and_ranks_train_the_same_replicas(comm, runs):
    """Two of them, with the same windows. Two ranks also go on from the checkpoint of two nodes."""
    pair = comm.Split(comm.rank // 2, comm.rank)
    flags = ["--strategy", "diloco", "--local-steps", 4, "--fragments", 2]
    runs.run("nodes", *flags, "--batch-size", 2, world=world_of(comm, pair))
    runs.interrupted("nodes", "resumed")
    if comm.rank < 2:
        for out, more in (("ranks", []), ("resumed", ["--resume"])):
            alone = ["--replica", "rank", "--batch-size", 4]
            runs.run(out, *flags, *alone, *more, world=world_of(pair, pair.Split(0, pair.rank)))
    comm.Barrier()
    expected, _, parameters = runs.result("nodes")
    for out in ("ranks", "resumed"):
        found, _, found_parameters = runs.result(out)
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=out)
        np.testing.assert_allclose(found_parameters, parameters, rtol=0, atol=1e-5, err_msg=out)
