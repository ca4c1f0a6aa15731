"""scripts/train.py where ranks share models: a run that is cut anew each time it goes on, beside one serial rank's."""

import numpy as np
import pytest

from dist.world import world_of
from gpt2.data.shards import write_shard
from gpt2.formats import weights
from tests.support.in_process import alone, log, train
from traces import read_run

# 3 heads over 2 parts, 3 layers over 2 stages, and a head that is borrowed; eps as in tests/support/model_parallel.py.
FLAGS = [
    "--n-layer", 3, "--n-head", 3, "--n-embd", 12, "--context", 8, "--vocab-size", 50, "--batch-size", 1,
    "--strategy", "reduce-scatter", "--lr", 0.01, "--eps", 1e-4, "--grad-clip", 0.3, "--eval-every", 2,
]  # fmt: skip
GLOBAL_BATCH, STEPS = 4, 2  # of each shape
# Copies, parts, stages.
SHAPES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]


def flags_of(copies: int, parts: int, stages: int, steps: int) -> list:
    cut = ["--tensor-parallel", parts, "--pipeline-parallel", stages, "--grad-accum", GLOBAL_BATCH // copies]
    trace = ["--trace", "on" if (copies, parts, stages) == SHAPES[-1] else "off"]
    return [*FLAGS, *cut, *trace, "--steps", steps, "--lr-steps", STEPS * len(SHAPES)]


@pytest.mark.ranks(4)
def test_a_run_goes_on_at_any_shape(comm, shared_path):
    tokens = np.random.default_rng(1).integers(50, size=2000).astype(np.uint16)
    if comm.rank == 0:
        write_shard(shared_path / "train.bin", tokens)
        write_shard(shared_path / "val.bin", tokens[:100])
    comm.Barrier()
    data = ["--train-data", shared_path / "train.bin", "--val-data", shared_path / "val.bin", "--eval-steps", 0]
    run, serial = shared_path / "run", shared_path / "serial"
    for number, shape in enumerate(SHAPES):
        ranks = int(np.prod(shape))
        own = comm.Split(0 if comm.rank < ranks else 1, comm.rank)
        if comm.rank < ranks:
            world = world_of(own, own.Split(0, own.rank))
            train(world, run, *data, *flags_of(*shape, STEPS * (number + 1)), *(["--resume"] if number else []))
        comm.Barrier()
    if comm.rank > 0:
        return
    train(alone(), serial, *data, *flags_of(1, 1, 1, STEPS * len(SHAPES)))
    found, expected = log(run), log(serial)
    assert min(line["grad_norm"] for line in expected) > 0.3, "clipping must have been at work"
    for name, most in (("loss", 1e-5), ("grad_norm", 1e-4), ("val_loss", 1e-5)):
        assert len([line for line in expected if name in line]) >= len(SHAPES)
        pairs = [[line.get(name) for line in lines if line.get(name) is not None] for lines in (found, expected)]
        np.testing.assert_allclose(*pairs, rtol=most, err_msg=name)
    np.testing.assert_allclose(weights.load(run).flat, weights.load(serial).flat, atol=1e-5)
    mesh = read_run(run).mesh
    assert [mesh.stage.tolist(), mesh.shard.tolist(), mesh.replica.tolist()] == [[0, 1, 2, 3], [0] * 4, [0] * 4]
