"""bench_step.py on CPUs: what the loop of the peak computes, and what the report makes of the contenders' turns."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.config import PRESETS
from gpt2.kernels.numpy import amx_bf16, bf16_products
from scripts.step_bench import bench
from scripts.step_bench.peak import InstructionPeak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_makes_the_operations_that_are_counted(dtype):
    """Every sum gets a product of twos, or several, each round: the total says how many sums there were."""
    peak, rounds, twos = InstructionPeak(dtype), 7, 0x40004000
    by_tiles = dtype == "bfloat16" and amx_bf16.available()
    by_pairs = dtype == "bfloat16" and bf16_products.available()
    assert peak.instruction == ("TDPBF16PS" if by_tiles else "VDPBF16PS" if by_pairs else "float32 FMA")
    factor = 2.0 if by_pairs else float(np.int32(twos).view(np.float32))
    products = peak.run(rounds, twos) / factor**2 * (4 if by_tiles else 1)  # of one lane, or in one place of four tiles
    lanes = peak.flops_a_round * rounds / (2 * products)
    assert lanes == pytest.approx(256 if by_tiles else 16 if by_pairs else round(lanes), rel=1e-5)
    assert round(lanes) in (8, 16, 256)
    assert peak.flops(1) > 0


def test_the_peak_is_the_best_turn_and_the_first_turn_is_warm_up(monkeypatch, tmp_path, capsys):
    """MFU is the model's operations a second over the peak; a contender that fails costs a line, and the exit code."""
    program = """
import json, sys
name = sys.argv[-2]
steps = {"ours": [9, 2, 2, 8], "floor": [1, 1, 1, 1], "torch": [4, 4, 4, 4]}
if name == "torch-compiled":
    print(json.dumps({"error": "no compiler"}), flush=True)
for turn, line in enumerate(sys.stdin):
    assert line == ("1\\n" if turn else "3\\n")
    answer = {"flops": [9e12, 1e12, 2e12, 1e12][turn]} if name == "peak" else {
        "step_s": steps[name][turn], "loss": 5.0 + turn, "memory_bytes": 1e9, "parts": {"all": 1.0}, "versions": {}}
    print(json.dumps(answer), flush=True)
"""
    monkeypatch.setattr(bench, "SETTLE_S", {"numpy": 0.0})
    shape = {"backend": "numpy", "model": "tiny", "batch_size": 1, "seq_len": 8, "dtype": "float32", "threads": 1}
    settings = SimpleNamespace(**shape, repeat=3, json=tmp_path / "s", vs={"torch": None})
    assert bench.bench(settings, PRESETS["tiny"], [sys.executable, "-c", program]) == 1
    report = json.loads((tmp_path / "s").read_text())
    ours, floor, torch = (report["contenders"][name] for name in ("ours", "floor", "torch"))
    assert report["peak_tflops"] == 9.0
    assert (ours["step_s"], ours["turns_s"], ours["loss"]) == (2, [2, 2, 8], 5.0)
    assert ours["mfu"] == pytest.approx(8 / 2 * report["flops_per_token"] / 9e12)
    assert (floor["ours_over_this"], torch["ours_over_this"]) == (2, 0.5)
    assert report["contenders"]["torch-compiled"] == {"error": "no compiler"}
    printed = capsys.readouterr().out
    assert "PyTorch, torch.compile  not measured: no compiler\n" in printed
    assert "matrix products alone, where the step goes:\n    all  " in printed
