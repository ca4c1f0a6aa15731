"""Runs with a split embedding: the weights of those without, the same bits again, and when a run is taken up again."""

import json
import shutil

import numpy as np
import pytest

from dist.world import start_world, world_of
from gpt2.data.shards import write_shard
from gpt2.formats import weights
from tests.support.in_process import log, train

SIZES = ["--n-layer", 2, "--n-head", 1, "--n-embd", 10, "--context", 8, "--vocab-size", 301, "--trace", "off"]
STEPS = ["--steps", 6, "--checkpoint-every", 3, "--eval-every", 3, "--lr", 1e-2, "--warmup", 1, "--eps", 1e-4]


class Runs:
    """Runs of scripts/train.py with --overlap, in this process, on the ranks of a world."""

    def __init__(self, comm, folder):
        self.world, self.folder = start_world(), folder
        if comm.rank == 0:
            tokens = np.random.default_rng(1).zipf(1.3, size=5001) % 301
            write_shard(folder / "tokens.bin", tokens.astype(np.uint16))
        comm.Barrier()

    def run(self, out, *flags, world=None, micro_steps=1):
        data = ["--train-data", self.folder / "tokens.bin", "--val-data", self.folder / "tokens.bin"]
        batch = ["--batch-size", 12 // self.world.size, "--grad-accum", micro_steps]
        train(world or self.world, self.folder / out, *SIZES, *STEPS, *data, *batch, "--overlap", *flags)

    def result(self, out):
        """(losses and norms, parameters) of a run."""
        curve = [number for line in log(self.folder / out) for number in (line["loss"], line["grad_norm"])]
        return np.array(curve), weights.load(self.folder / out).flat

    def config(self, out):
        return json.loads((self.folder / out / "config.json").read_text())


@pytest.fixture
def runs(comm, shared_path):
    return None if comm is None else Runs(comm, shared_path)


@pytest.mark.ranks(4)
def test_split_runs_have_the_weights_of_others_and_go_on_with_the_same_bits(comm, runs):
    nodes = world_of(comm, comm.Split(comm.rank % 2, comm.rank))
    for number, strategy in enumerate(("hierarchical", "hierarchical-sharded")):
        flags, micro_steps = ["--strategy", strategy], (1, 4)[number % 2]
        on, off, again = (f"{strategy}-{what}" for what in ("on", "off", "again"))
        runs.run(off, *flags, "--split-embedding", "off", world=nodes, micro_steps=micro_steps)
        runs.run(on, *flags, world=nodes, micro_steps=micro_steps)
        (curve, weights), (others, other_weights) = runs.result(on), runs.result(off)
        np.testing.assert_allclose(curve, others, rtol=1e-5)
        np.testing.assert_allclose(weights, other_weights, rtol=1e-5, atol=2e-6)
        assert runs.config(on)["embedding"].startswith("head and looked-up rows apart: a step looks up ")
        assert runs.config(off)["embedding"].startswith("whole: as asked for")
        looked_up = runs.config(on)["looked_up"]
        assert len(looked_up["of_nodes"]) == 2
        assert max(looked_up["of_nodes"]) <= looked_up["any"] <= sum(looked_up["of_nodes"])

        if comm.rank == 0:
            shutil.copytree(runs.folder / on, runs.folder / again)
            checkpoints = runs.folder / again / "checkpoints"
            (checkpoints / "step-00000006").rename(checkpoints / "step-00000006.part")
        comm.Barrier()
        runs.run(again, *flags, "--resume", world=nodes, micro_steps=micro_steps)
        assert runs.result(again)[1].tobytes() == weights.tobytes()
        assert runs.config(again)["embedding"].startswith("head and looked-up rows apart: as before")
