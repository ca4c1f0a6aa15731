"""The blocks of docs/gpu.md from what a GPU session wrote."""

import re
from pathlib import Path

from scripts.makers import docs_gpu

ROOT = Path(__file__).parents[2]

MACHINE = {"GPU": "NVIDIA H200", "CuPy": "14.2.0", "numpy": "2.5.2"}
STEP = {
    "settings": {"model": "gpt2-124M", "batch_size": 64, "seq_len": 1024, "dtype": "bfloat16", "turns": 7,
                 "steps_a_turn": 5},
    "machine": MACHINE, "peak_tflops": 990, "flops_per_token": 803.5e6, "seconds": 200.0,
    "rates": {"copy_bytes_per_s": 4e12, "matmul_flops": 8e14},
    "kernels": {
        "phases_ms": {"forward": 30.0, "backward": 60.0, "update": 10.0},
        "rows": {
            "product 8 x 8 x 8": {"launches": 12, "ms": 60.0, "bytes": 4e9, "flops": 4e13},
            "gelu_backward": {"launches": 12, "ms": 4.0, "bytes": 12e9, "flops": 0},
        },
        "choices": [
            {"work": "dgelu", "shape": [65536, 3072], "theirs_ms": None, "ours_ms": 0.8},
            {"work": "bias gradient", "shape": [3072, 768], "theirs_ms": 0.5, "ours_ms": 0.6},
        ],
    },
    "candidates": {
        "layernorm_kept": {"a_step": 25, "today_ms": 0.15, "candidate_ms": 0.1, "today_over_candidate": 1.5,
                           "difference": 0.0},
        "cudnn_any_order": {"error": "no cuDNN"},
    },
    "contenders": {
        "ours": {"step_s": 0.1, "min_s": 0.09, "max_s": 0.11, "tokens_per_s": 655360.0, "mfu": 0.532,
                 "ours_over_this": 1.0, "memory_bytes": 30e9, "loss": 9.5},
        "torch": {"error": "out of memory", "versions": {"torch": "2.11"}},
    },
}  # fmt: skip


def test_a_steps_tables():
    block = docs_gpu.step_block(STEP)
    ours = next(line for line in block.splitlines() if line.startswith("this project  "))
    assert ours.split()[2:] == ["100.00", "90.00", "110.00", "655,360", "53.2%", "1.000", "30.0", "9.5000"]
    assert "PyTorch, eager               not measured: out of memory" in block
    product, gelu = (next(line.split() for line in block.splitlines() if name in line) for name in ("8 x 8", "gelu_"))
    assert product[-4:] == ["60.0%", "50.000", "1.20", "products"]
    assert gelu[-4:] == ["4.0%", "3.000", "1.33", "bytes"]
    between = next(line.split() for line in block.splitlines() if "between kernels" in line)
    assert between[-2:] == ["36.000", "36.0%"]
    assert "dgelu 65536 x 3072: theirs not there, ours 0.800 ms" in block
    assert "bias gradient 3072 x 768: theirs 0.500 ms, ours 0.600 ms" in block
    kept = next(line for line in block.splitlines() if "row kept in registers" in line)
    assert kept.split()[-6:] == ["25", "0.150", "0.100", "1.500", "1.25", "0"]
    assert re.search(r"sums in any order +not measured: no cuDNN", block)
    assert block.endswith("Measured on NVIDIA H200, with CuPy 14.2.0, numpy 2.5.2, torch 2.11.")


def test_how_tests_ended():
    tests = {
        "tests/gpu/on_device/test_kernels.py::test_kernel[gelu_case]": {"outcome": "passed"},
        "tests/gpu/on_device/test_items.py::test_item[compile]": {
            "outcome": "failed",
            "error": "...\nE  8 bytes spilled",
        },
    }
    block = docs_gpu.tests_block({"machine": MACHINE, "summary": {"failed": 1, "passed": 1}, "tests": tests})
    first, second, *_ = block.splitlines()
    assert first == "1 failed, 1 passed."
    assert second == "- `test_items.py::test_item[compile]` failed: E  8 bytes spilled"


def test_the_page_has_both_blocks(tmp_path, monkeypatch):
    """They are replaced in place."""
    from scripts.makers.pages import page as docs_page

    page = (ROOT / docs_gpu.PAGE).read_text()
    monkeypatch.setattr(docs_page, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / docs_gpu.PAGE).write_text(page)
    for name in ("gpu_tests", "gpu_step"):
        docs_page.replace_block(docs_gpu.PAGE, name, f"new {name}")
    text = (tmp_path / docs_gpu.PAGE).read_text()
    assert text.count("new gpu_") == 2
