"""The blocks and the figure of README.md and docs/gpu.md from the result files in docs/gpu/."""

import json
import re
import shutil
import sys

import pytest

from scripts.makers import docs_gpu
from scripts.makers.pages import page
from scripts.step_bench.gpu_table import kernel_table, row

MACHINE = {"GPU": "NVIDIA H200", "CuPy": "14.2.0", "numpy": "2.5.2"}
STEP = {
    "settings": {"model": "gpt2-124M", "batch_size": 64, "seq_len": 1024, "dtype": "bfloat16", "turns": 7,
                 "steps_a_turn": 5},
    "machine": MACHINE, "peak_tflops": 990, "flops_per_token": 803.5e6, "seconds": 200.0,
    "rates": {"copy_bytes_per_s": 4e12, "matmul_flops": 8e14, "matmul_burst_flops": 9e14},
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
    "contenders": {
        "ours": {"step_s": 0.1, "min_s": 0.09, "max_s": 0.11, "tokens_per_s": 655360.0, "mfu": 0.532,
                 "ours_over_this": 1.0, "memory_bytes": 30e9, "loss": 9.5},
        "torch": {"error": "out of memory", "versions": {"torch": "2.11"}},
    },
}  # fmt: skip


def test_a_steps_tables():
    ours = row("this project", STEP["contenders"]["ours"])
    assert ours.split()[2:] == ["100.00", "90.00", "110.00", "655,360", "53.2%", "1.000", "30.0", "9.5000"]
    block = kernel_table(STEP)
    product, gelu = (next(line.split() for line in block.splitlines() if name in line) for name in ("8 x 8", "gelu_"))
    assert product[-4:] == ["60.0%", "50.000", "1.20", "products"]
    assert gelu[-4:] == ["4.0%", "3.000", "1.33", "bytes"]
    between = next(line.split() for line in block.splitlines() if "between kernels" in line)
    assert between[-2:] == ["36.000", "36.0%"]
    assert "dgelu 65536 x 3072: theirs not there, ours 0.800 ms" in block
    assert "bias gradient 3072 x 768: theirs 0.500 ms, ours 0.600 ms" in block


def test_the_pages_are_those_of_the_files():
    for name, made in docs_gpu.blocks().items():
        text = (page.ROOT / name).read_text()
        for block, content in made.items():
            begin, end = f"<!-- begin generated: {block} -->", f"<!-- end generated: {block} -->"
            assert f"{begin}\n{content}\n{end}" in text, f"{block}: run python scripts/makers/docs_gpu.py"


def test_a_row_of_each_shape_and_a_dash_where_nothing_was_measured():
    reports = docs_gpu.step_reports()
    lines = docs_gpu.speed_table(reports).splitlines()
    for report in reports:
        one = report["contenders"]
        start = f"{docs_gpu.gpu_name(report)} {report['settings']['model'][5:]} B={report['settings']['batch_size']} "
        (_, _, _, *upper), (_, _, _, *lower) = (line.split() for line in lines if line.startswith(start))
        for place, name in enumerate(("ours", "llmc", "torch-compiled", "torch")):
            cells = upper[place], upper[place + 4], lower[place], lower[place + 4]
            if "step_s" not in one.get(name, {}):
                assert cells == ("-",) * 4
                continue
            ms, tokens, mfu, gigabytes = map(float, cells)
            batch, shape = one[name]["step_s"] * 1e3, report["settings"]
            rate = shape["batch_size"] * shape["seq_len"] / batch  # thousands a second
            assert ms == pytest.approx(batch, abs=0.06)
            assert tokens == pytest.approx(rate, abs=0.06)
            assert mfu == pytest.approx(rate * report["flops_per_token"] / 990e9 * 100, abs=0.06)
            assert gigabytes == pytest.approx(one[name]["memory_bytes"] / 1e9, abs=0.06)


def test_bars_are_as_long_as_the_speeds_and_say_what_was_not_measured():
    reports = docs_gpu.main_reports()
    figure = docs_gpu.draw(reports)
    for axes, report in zip(figure.axes, reports, strict=True):
        measured = [one["tokens_per_s"] / 1e3 for one in map(report["contenders"].get, docs_gpu.NAMES)
                    if "error" not in one]  # fmt: skip
        assert [bar.get_width() for bar in axes.patches] == pytest.approx(measured)
        texts = [text.get_text() for text in axes.texts]
        assert texts.count("not measured") == 4 - len(measured)
    assert docs_gpu.ratio_text(reports, "torch-compiled") == "1.13 to 1.17 times"


def test_a_new_result_goes_into_the_folder_with_its_commit(tmp_path, monkeypatch):
    results = shutil.copytree(docs_gpu.RESULTS, tmp_path / "docs" / "gpu")
    for name in ("README.md", "docs/gpu.md"):
        shutil.copy(page.ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "figures").mkdir()
    report = json.loads((results / "h200_124M_B64.json").read_text())
    report["contenders"]["ours"]["step_s"] = 0.1004
    (tmp_path / "gpu.json").write_text(json.dumps({name: report[name] for name in report if name != "commit"}))
    monkeypatch.setattr(docs_gpu, "RESULTS", results)
    monkeypatch.setattr(docs_gpu, "FIGURES", tmp_path / "docs" / "figures")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["docs_gpu.py", "--step", str(tmp_path / "gpu.json"), "--commit", "f00"])
    docs_gpu.main()
    assert json.loads((results / "h200_124M_B64.json").read_text())["commit"] == "f00"
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert re.search(r"H200 124M B=64 +100.4 +114.1", text)
    assert "at commit 36b07cf and f00" in text
    assert (tmp_path / "docs" / "figures" / "gpu.png").stat().st_size > 0
