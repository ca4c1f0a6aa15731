"""scripts/train.py on GPUs that are none: in the test's own process, on a CuPy whose GPU is the CPU shim."""

import json
from dataclasses import replace

import numpy as np

from gpt2.data.shards import write_shard
from gpt2.kernels.cupy import cublaslt, device
from tests.gpu.cuda_shim import fake_cupy
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.cuda_shim.shim import Shim, lasting_build
from tests.support.in_process import PEAK_GIVEN, log
from tests.support.in_process import train as train_here

SMALL = ["--n-layer", 1, "--n-head", 1, "--n-embd", 64, "--context", 8, "--vocab-size", 100, "--steps", 2]
USUAL = ["--batch-size", 1, "--lr", 1e-2, "--warmup", 1, "--eval-every", 2, "--eval-steps", 1, "--trace", "off"]
USUAL += ["--strategy", "reduce-scatter"]  # unless a test's flags name another
DEEP = ["--n-layer", 3, "--grad-accum", 2]  # layers that take turns in ZeRO's places, micro-steps that add up


def on_nodes(comm, per_node):
    """The world as if so many ranks at a time had a host of their own, and its GPUs."""
    from dist.world import world_of

    world = world_of(comm, comm.Split(comm.rank // per_node, comm.rank))
    places = [place | {"host": f"node-{place['node']}"} for place in world.places]
    return replace(world, host=f"node-{world.node}", places=places)


class Trainer:
    """Runs of scripts/train.py in this process, on all ranks of a world, each on a newly made GPU."""

    def __init__(self, comm, monkeypatch, folder):
        from dist.world import start_world
        from scripts.backends import choose, transports

        self.monkeypatch, self.world = monkeypatch, start_world()
        self.folder = folder
        self.shim = Shim(lasting_build())
        self.count = 0
        monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
        monkeypatch.setattr(device, "cached_code", lambda source, storage, arch, cache: f"{source} {storage}".encode())
        monkeypatch.setattr(transports, "says_gpu_aware", lambda: (True, "this test"))
        monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: True)
        if comm.rank == 0:
            write_shard(self.folder / "tokens.bin", np.random.default_rng(1).integers(100, size=3001).astype(np.uint16))
        comm.Barrier()

    def run(self, *flags, world=None, peak=PEAK_GIVEN, again=False, **machine):
        """(losses, norms and the last validation loss; the checkpoint's bytes) of a run, or of the last one again."""
        world = world or self.world
        self.count += not again
        out = self.folder / f"{self.count}-{self.world.rank if world.size == 1 else 0}"
        fake_cupy.install(self.monkeypatch, self.shim, **{"gpus": 4, "nccl": True} | machine)
        data = ["--train-data", self.folder / "tokens.bin", "--val-data", self.folder / "tokens.bin"]
        registered = fake_cupy.Host.registered
        train_here(world, out, *SMALL, *USUAL, *data, *flags, peak=peak)
        assert fake_cupy.Host.registered == registered, "all memory that was pinned is let go"
        lines = log(out)
        curve = [number for line in lines for number in (line["loss"], line["grad_norm"])] + [lines[-1]["val_loss"]]
        checkpoints = [path.read_bytes() for path in out.glob("checkpoints/*/model.bin")]
        self.config = json.loads((out / "config.json").read_text())
        self.out = out
        return np.array(curve), checkpoints
