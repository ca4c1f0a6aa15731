"""scripts/train.py on GPUs that are none: every strategy over every transport, on a CuPy whose GPU is the CPU shim.

All runs of a test share one mpirun: starting it is most of their time.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_shim import fake_cupy, fake_streams
from cuda_shim.fake_cublaslt import FakeCublasLt
from cuda_shim.shim import Shim, lasting_build

from gpt2.cupy_kernels import cublaslt, device
from gpt2.shards import write_shard
from strategies import OWN_EXCHANGES, STRATEGIES

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

SMALL = ["--n-layer", 1, "--n-head", 1, "--n-embd", 64, "--context", 16, "--vocab-size", 100, "--steps", 2]
USUAL = ["--batch-size", 1, "--lr", 1e-2, "--warmup", 1, "--eval-every", 2, "--eval-steps", 1, "--trace", "off"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU shim needs g++")


class Trainer:
    """Runs of scripts/train.py in this process, on all ranks of a world, each on a newly made GPU."""

    def __init__(self, comm, monkeypatch, tmp_path):
        import choose_backend
        import train
        import transports

        from dist.world import start_world

        self.train, self.monkeypatch, self.world = train, monkeypatch, start_world()
        self.folder = Path(comm.bcast(str(tmp_path)))
        self.shim = Shim(lasting_build())
        self.count = 0
        monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
        monkeypatch.setattr(device, "cached_code", lambda source, storage, arch, cache: f"{source} {storage}".encode())
        monkeypatch.setattr(transports, "says_gpu_aware", lambda: (True, "this test"))
        monkeypatch.setattr(choose_backend.importlib.util, "find_spec", lambda name: True)
        if comm.rank == 0:
            write_shard(self.folder / "tokens.bin", np.random.default_rng(1).integers(100, size=3001).astype(np.uint16))
        comm.Barrier()

    def run(self, *flags, world=None, **machine):
        """(loss and norm of each step and the last validation loss, the checkpoint's bytes) of one run."""
        world = world or self.world
        self.count += 1
        out = self.folder / f"{self.count}-{self.world.rank if world.size == 1 else 0}"
        fake_cupy.install(self.monkeypatch, self.shim, **{"gpus": 4, "nccl": True} | machine)
        data = ["--train-data", self.folder / "tokens.bin", "--val-data", self.folder / "tokens.bin"]
        arguments = map(str, [*SMALL, *USUAL, *data, "--out", out, *flags])
        self.train.train(self.train.parse_settings("", list(arguments)), world)
        assert not fake_cupy.Host.pinned or "numpy" in flags or world.size, "all that was pinned is let go"
        world.comm.Barrier()
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        curve = [number for line in lines for number in (line["loss"], line["grad_norm"])] + [lines[-1]["val_loss"]]
        checkpoints = [path.read_bytes() for path in out.glob("checkpoints/*/model.bin")]
        self.config = json.loads((out / "config.json").read_text())
        return np.array(curve), checkpoints


@pytest.fixture
def trainer(comm, monkeypatch, tmp_path):
    return None if comm is None else Trainer(comm, monkeypatch, tmp_path)


def cases(ranks):
    """(flags, transport in the end) of every strategy over every transport."""
    for name, kind in STRATEGIES.items():
        if name == "none":
            continue
        own = issubclass(kind, OWN_EXCHANGES)
        yield ["--strategy", name, "--transport", "host"], "host"
        if own:
            yield ["--strategy", name, "--overlap"], "host"
        else:
            yield ["--strategy", name], "alone" if ranks == 1 else "nccl"
            yield ["--strategy", name, "--transport", "gpu-aware"], "gpu-aware"
    if ranks > 1:
        yield ["--strategy", "reduce-bcast", "--server", "dedicated"], "nccl"
        yield ["--strategy", "reduce-bcast", "--server", "dedicated", "--transport", "host"], "host"


@pytest.mark.ranks(1, 2, 3)
def test_every_transport_gives_numpys_curve(comm, trainer):
    import time
    t0 = time.time()
    reference = {}
    for server in ([], ["--server", "dedicated"]) if comm.size > 1 else ([],):
        reference[bool(server)], _ = trainer.run("--backend", "numpy", "--strategy", "reduce-bcast", *server)
    for flags, transport in cases(comm.size):
        t = time.time()
        curve, checkpoints = trainer.run("--backend", "cupy", *flags)
        if comm.rank == 0: print(f"{time.time()-t:.2f}", flags, file=sys.__stderr__)
        assert trainer.config["settings"]["transport"] == transport
        np.testing.assert_allclose(curve, reference["--server" in flags], rtol=1e-4, err_msg=str(flags))
        assert len(checkpoints) == 1
