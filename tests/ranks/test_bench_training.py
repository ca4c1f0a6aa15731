"""bench_training.py: steps of ours and of PyTorch's, from the same parameters, over the same windows, to one loss."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.support.launch import launch

BENCH = Path(__file__).parents[2] / "scripts" / "bench_training.py"
SMALL = ["--n-layer", 2, "--n-head", 2, "--n-embd", 16, "--context", 16, "--vocab-size", 300, "--batch-size", 2]
HAS_TORCH = importlib.util.find_spec("torch") is not None


def measured(tmp_path, *flags):
    file = tmp_path / "steps.json"
    own = ["--turns", 1, "--steps", 2, "--out", tmp_path / "runs", "--json", file]
    command = [sys.executable, BENCH, *own, *flags, "--", *SMALL, "--grad-accum", 2, "--lr", 0.01, "--warmup", 1]
    result = launch(2, [str(word) for word in command])
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "runs").exists()
    return result.stdout, json.loads(file.read_text())


def test_ours_alone(tmp_path):
    names = ["ours, no exchange", "ours", "ours, bfloat16 wire", "ring/bfloat16"]
    printed, report = measured(tmp_path, "--contenders", ";".join(names))
    contenders = report["contenders"]
    assert [*contenders] == names
    assert contenders["ours"]["loss_differs"] == 0
    assert contenders["ours, bfloat16 wire"]["loss_differs"] < 1e-2  # 0 where sums need no wire
    assert 0 < contenders["ring/bfloat16"]["loss_differs"] < 1e-2
    assert len(contenders["ours"]["losses"]) == 3
    assert all(one["step_s"] == pytest.approx(one["compute_s"] + one["exposed_s"]) for one in contenders.values())
    assert "turn 1 of 1, ours: " in printed
    assert ("PyTorch is not installed" in printed) == (not HAS_TORCH)


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")
def test_pytorch_trains_the_same(tmp_path):
    _, report = measured(tmp_path)
    contenders = report["contenders"]
    for name in ("DDP", "DDP, ZeRO optimizer", "FSDP"):
        assert contenders[name]["loss_differs"] < 1e-5, name
    assert 0 < contenders["DDP, float16 hook"]["loss_differs"] < 1e-2
    ddp, low_rank = (contenders[name]["losses"] for name in ("DDP", "DDP, PowerSGD hook of rank 1"))
    assert low_rank[:2] == pytest.approx(ddp[:2], rel=1e-6)
    assert 1e-6 < abs(low_rank[2] / ddp[2] - 1) < 0.1  # the second step sent factors
    assert contenders["DDP"]["losses"][-1] < contenders["DDP"]["losses"][0]
    assert contenders["PyTorch, no exchange"]["losses"] != contenders["DDP"]["losses"]


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")
def test_an_error_beside_gloo_is_printed():
    program = (
        "from dist.world import start_world; from scripts.training_bench.gloo import start_gloo; "
        "start_gloo(start_world()); raise RuntimeError('after gloo')"
    )
    result = launch(2, [sys.executable, "-c", program])
    assert result.returncode != 0
    assert "RuntimeError: after gloo" in result.stderr
