"""train.py --dtype bfloat16 on CPUs, on several ranks: float32's curve but for rounding, and float32's checkpoints."""

import json

import numpy as np
import pytest

from dist.world import start_world
from gpt2.data.shards import write_shard
from gpt2.formats import weights
from tests.support.in_process import alone, log, train

SIZES = ["--n-layer", 2, "--n-head", 4, "--n-embd", 36, "--context", 24, "--vocab-size", 100, "--trace", "off"]
STEPS = ["--steps", 6, "--checkpoint-every", 3, "--eval-every", 6, "--lr", 1e-2, "--lr-steps", 6, "--warmup", 1]
STEPS += ["--eps", 1e-4]
BATCH = 6  # of all ranks together


@pytest.fixture
def run(comm, shared_path):
    if comm is None:
        return None
    if comm.rank == 0:
        write_shard(shared_path / "tokens.bin", np.sort(np.random.default_rng(1).integers(100, size=4001)).astype("u2"))
    comm.Barrier()
    data = ["--train-data", shared_path / "tokens.bin", "--val-data", shared_path / "tokens.bin"]

    def run(name, *flags, world=None):
        world = world or start_world()
        train(world, shared_path / name, *SIZES, *STEPS, *data, "--batch-size", BATCH // world.size, *flags)
        return shared_path / name

    return run


def parameters_of(path):
    """Of its last checkpoint, which are float32."""
    return weights.load(path).flat


def losses(path):
    return [line["loss"] for line in log(path)]


@pytest.mark.ranks(1, 3)
def test_every_number_of_ranks_gives_float32s_curve_but_for_rounding(comm, run):
    """Against serial runs in float32 and in bfloat16; of the latter, float32 sums alone are in another order."""
    first = run("f32")
    rounded = run("bf16", "--dtype", "bfloat16", "--strategy", "reduce-scatter")
    again = run("again", "--dtype", "bfloat16", "--strategy", "reduce-scatter")
    sharded = run("zero", "--dtype", "bfloat16", "--strategy", "zero-2")
    if comm.rank == 0:
        expected = losses(run("alone", "--dtype", "bfloat16", "--strategy", "allreduce", world=alone()))
        assert losses(rounded) == pytest.approx(expected, abs=2e-3)
        assert losses(sharded) == pytest.approx(expected, abs=2e-3)
        assert losses(rounded) == pytest.approx(losses(first), abs=0.01)
        assert losses(rounded) != losses(first)
        assert losses(rounded) == losses(again)
        assert parameters_of(rounded).tobytes() == parameters_of(again).tobytes()
        settings = json.loads((rounded / "config.json").read_text())
        assert "bfloat16" in settings["products"]
    comm.Barrier()


CUT = {
    "wire": ["--strategy", "ring", "--wire", "bfloat16"],
    "tensors": ["--tensor-parallel", 2, "--batch-size", BATCH],
    "stages": ["--pipeline-parallel", 2, "--batch-size", BATCH // 2, "--grad-accum", 2],
}


@pytest.mark.ranks(2)
def test_bfloat16_goes_together_with(comm, run):
    """bfloat16 messages, parts of tensors, stages of layers: the curve of one rank that has all, but for rounding."""
    found = {name: losses(run(name, "--dtype", "bfloat16", *flags)) for name, flags in CUT.items()}
    if comm.rank == 0:
        expected = losses(run("alone", "--dtype", "bfloat16", "--strategy", "allreduce", world=alone()))
        for name in CUT:
            assert found[name] == pytest.approx(expected, abs=5e-3), name
    comm.Barrier()


@pytest.mark.ranks(2)
def test_a_run_goes_on_in_the_other_dtype(comm, run, capsys):
    run("run", "--steps", 3)
    capsys.readouterr()
    run("run", "--dtype", "bfloat16", "--resume")
    text = capsys.readouterr().out
    path = run("whole")
    if comm.rank == 0:
        assert "dtype bfloat16 (before float32)" in text
        assert losses(path)[:3] == losses(path.parent / "run")[:3]
        assert losses(path.parent / "run") == pytest.approx(losses(path), abs=0.01)
    comm.Barrier()
