"""The blocks and the figure of README.md and docs/gpu.md from the result files in docs/gpu/."""

import json
import re
import shutil
import sys

import pytest

from scripts.makers import docs_gpu
from scripts.makers.pages import page


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
