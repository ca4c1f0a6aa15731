"""Exchanges on a stream beside the one that computes, of GPUs that are none: ZeRO, and buckets during backward."""

import numpy as np
import pytest

from dist.gpu.exchange import StreamEngine
from gpt2.formats.checkpoints import Checkpoint, newest_first
from scripts.backends import transports
from strategies.sharded import Sharded
from tests.gpu.gpu_trainer import on_nodes

pytestmark = pytest.mark.any_mpi
BUCKET_BYTES = 60_000  # of 235,000: three buckets
RUNS = {
    "hierarchical-sharded": ["--strategy", "hierarchical-sharded", "--wire", "bfloat16"],
    "zero-3": ["--strategy", "zero-3", "--n-layer", 3, "--dtype", "bfloat16"],
}


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch):
    monkeypatch.setattr(transports, "DEVICE_BUCKET_BYTES", BUCKET_BYTES)


def start_at_once(progress, exchange):
    with progress._stream:
        for _ in exchange:
            pass
    return progress._mark(progress._stream)


WAITS = {  # what takes it out, and which stream is late then
    "exchanges do not wait for what is computed": ("start", start_at_once, "first stream"),
    "compute does not wait for exchanges": ("finish", lambda progress, end=None: None, "other streams"),
}


@pytest.mark.ranks(2)
def test_the_streams_wait_for_each_other(comm, trainer, monkeypatch):
    """Whichever is late, the bits are the same; with either wait taken out the numbers are wrong. A rank a node."""
    nodes = on_nodes(comm, 1)
    for name, flags in RUNS.items():
        flags, curves = ["--backend", "cupy", *flags, "--overlap"], []
        for what, (method, broken, lag) in WAITS.items():
            curve, checkpoint = trainer.run(*flags, world=nodes, lag=lag)
            assert trainer.config["settings"]["transport"] == "nccl"
            curves.append((curve.tobytes(), checkpoint))
            with monkeypatch.context() as patch:
                patch.setattr(StreamEngine, method, broken)
                try:
                    wrong, _ = trainer.run(*flags, world=nodes, lag=lag)
                except SystemExit:  # the loss was not a number
                    continue
            assert not np.allclose(wrong, curve, rtol=1e-4), f"{name}: {what}"
        assert curves[0] == curves[1], name


@pytest.mark.ranks(2)
def test_a_checkpoint_holds_the_size_of_the_buckets_that_were_exchanged(comm, trainer, monkeypatch):
    """A run that goes on has buckets of that size, though a new run would have one bucket."""
    update, seen = Sharded.update, []
    monkeypatch.setattr(Sharded, "update", lambda strategy, lr: seen.append(strategy.buckets) or update(strategy, lr))
    flags = ["--backend", "cupy", "--strategy", "reduce-scatter", "--overlap"]
    trainer.run(*flags, "--steps", 1, "--lr-steps", 2)
    assert Checkpoint(newest_first(trainer.out / "checkpoints")[0]).facts["bucket_bytes"] == BUCKET_BYTES
    monkeypatch.setattr(transports, "DEVICE_BUCKET_BYTES", 10 * BUCKET_BYTES)
    trainer.run(*flags, "--steps", 2, "--lr-steps", 2, "--resume", again=True)
    trainer.run(*flags, "--steps", 1)
    assert [len(buckets) for buckets in seen] == [3, 3, 1]


@pytest.mark.ranks(2)
def test_nobody_waits_for_a_bucket_before_the_update(comm, trainer, monkeypatch):
    """All but the last are queued while backward goes on; the host has seen none of it happen, on either stream."""
    update, seen = Sharded.update, []

    def look(strategy, lr):
        waiting = strategy.comm.stream.queue
        seen.append((strategy.started, len(strategy.buckets), len(waiting)))
        return update(strategy, lr)

    monkeypatch.setattr(Sharded, "update", look)
    trainer.run("--backend", "cupy", "--overlap", lag="everything")
    for started, buckets, waiting in seen:
        assert started == buckets == 3
        assert waiting >= 3 * buckets, "a wait for compute, a call and a copy of each"
