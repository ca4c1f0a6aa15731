"""bench_step.py --backend cupy on the fake GPU: contenders in processes of their own, the report."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.config import PRESETS, GPT2Config, flops_per_token
from gpt2.kernels import load_kernels
from gpt2.model import new_model
from gpt2.parameters import Layout
from scripts.machine.gpu import peak_tflops
from scripts.step_bench import bench, contenders
from scripts.step_bench.process import COMMAND, ContenderError
from tests.gpu.cuda_shim.shim import lasting_build

ROOT = Path(__file__).parents[2]
CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=64, context=32, vocab_size=250)
B, T = 2, 32


def settings(**changed):
    default = {"backend": "cupy", "batch_size": B, "seq_len": T, "dtype": "float32", "threads": 1, "model": "small"}
    return SimpleNamespace(**default | {"repeat": 1, "vs": {}, "json": None} | changed)


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(bench, "STEPS_A_TURN", {"cupy": 1})
    monkeypatch.setattr(bench, "WARM_UP_STEPS", 1)


@pytest.mark.usefixtures("few_steps")
def test_the_whole_command(monkeypatch, tmp_path, capsys):
    """Ours is measured; another contender that cannot start costs a line and the exit code."""
    program = str(ROOT / "tests/gpu/on_device/on_fake_gpu.py")
    command = [sys.executable, program, str(lasting_build()), *COMMAND[1:]]
    monkeypatch.setattr(bench, "peak_tflops", {"shim": 1.0}.get)
    file = tmp_path / "gpu.json"
    code = bench.bench(settings(json=file, vs={"llmc": tmp_path / "train_gpt2cu"}), CONFIG, command)
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    ours, llmc = (report["contenders"][name] for name in ("ours", "llmc"))
    assert code == 1
    assert llmc["error"].startswith("llm.c does not start")
    assert re.search(r"^llm.c +not measured: llm.c does not start", printed, re.MULTILINE)
    assert ours["loss"] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.1)
    assert ours["tokens_per_s"] == pytest.approx(B * T / ours["step_s"])
    flops = 6 * Layout(CONFIG).count + 6 * CONFIG.n_layer * CONFIG.n_embd * T
    assert ours["mfu"] == pytest.approx(ours["tokens_per_s"] * flops / 1e12)
    assert report["machine"]["GPU"] == "shim"
    assert "On shim." in printed


def test_a_datasheet_that_is_too_low_is_said(capsys):
    """A hundred tokens a second, 10 TFLOP/s, of 4: there is no MFU of 250%; and half of that is half."""
    session = bench.StepBench(settings(batch_size=1, seq_len=10), CONFIG, [])
    session.report |= {"peak_tflops": 4.0, "flops_per_token": 1e11}
    for name, seconds in (("ours", 0.1), ("torch", 0.2)):
        turn = {"step_s": seconds, "memory_bytes": 1, "loss": 1.0, "parts": {}, "versions": {}}
        session.record(name, [turn, turn])
    entries = session.report["contenders"].values()
    assert [entry["mfu"] for entry in entries] == pytest.approx([1.0, 0.5])
    assert all(entry["peak_underestimated"] for entry in entries)
    lines = capsys.readouterr().out.splitlines()
    assert " at most 100% (peak underestimated)  " in lines[0]
    assert " at most 50% (peak underestimated)  " in lines[1]


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("body", "message"),
    [("print(json.dumps({'error': 'no GPU'}), flush=True)", "no GPU"), ("sys.exit(3)", "ours ended with code 3")],
)
def test_our_own_failure_ends_the_command(body, message):
    program = f"import json, sys; sys.stdin.readline(); {body}"
    with pytest.raises(ContenderError, match=message):
        bench.bench(settings(), CONFIG, [sys.executable, "-c", program])


ANSWERS = """
import json, sys
for line in sys.stdin:
    answer = {"step_s": 0.1, "loss": 5.5, "memory_bytes": 1, "parts": {}, "versions": {}, "machine": {"GPU": "x"}}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.usefixtures("few_steps")
def test_each_has_the_gpu_to_itself(tmp_path):
    """No contender's process is there any more when the next one begins."""
    ids, file = tmp_path / "ids", tmp_path / "gpu.json"
    program = (
        f"import os; ids = open({str(ids)!r}, 'a+'); ids.seek(0)\n"
        "assert not any(os.path.exists(f'/proc/{id}') for id in ids.read().split())\n"
        "print(os.getpid(), file=ids, flush=True)\n"
    )
    assert bench.bench(settings(json=file, vs={"torch": None}), CONFIG, [sys.executable, "-c", program + ANSWERS]) == 0
    measured = json.loads(file.read_text())["contenders"]
    assert {name for name, entry in measured.items() if "step_s" in entry} == {"ours", "torch", "torch-compiled"}


def test_a_contender_answers_on_after_an_error():
    program = (
        "from scripts.step_bench.process import serve\n"
        "serve({'x': lambda shape: lambda count: {'a': 1 / count}}, 'x', '{}')"
    )
    result = subprocess.run([sys.executable, "-c", program], input="0\n1\n", capture_output=True, text=True, cwd=ROOT)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert answers == [{"error": "ZeroDivisionError: division by zero"}, {"a": 1}]


def test_mfu_is_llm_cs():
    """803.5 MFLOP a token of GPT-2 124M at T = 1024; the datasheets' rates by name."""
    config = PRESETS["gpt2-124M"]
    assert flops_per_token(config, 1024, Layout(config).count) / 1e6 == pytest.approx(803.5, abs=0.05)
    rates = {
        "NVIDIA H200": 990, "NVIDIA H100 80GB HBM3": 990, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312,
        "Quadro": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    }  # fmt: skip
    assert {name: peak_tflops(name) for name in rates} == rates


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_pytorch_does_our_step(compiled):
    """Its losses, on a CPU in float32, are those of the model on NumPy; its embedding's backward does not sort."""
    torch = pytest.importorskip("torch")
    config = CONFIG
    shape = {
        "backend": "numpy",
        "config": vars(config),
        "batch_size": B,
        "seq_len": T,
        "dtype": "float32",
        "threads": 1,
    }
    steps = contenders.pytorch(shape, compiled)
    wte = torch.zeros((config.vocab_size, 8), requires_grad=True)
    backwards = backward_names(logits_of_layers({"wte": wte, "wpe": wte, "lnf_weight": None, "lnf_bias": None}, torch))
    assert "EmbeddingBackward0" in backwards
    assert "IndexBackward0" not in backwards
    model = new_model(config, load_kernels("numpy", 1), B, T)
    model.parameters.flat[:] = contenders.first_parameters(config).flat
    ours = contenders.our_step(model, contenders.first_batch(config, shape))
    for _ in range(3):
        assert steps(1)["loss"] == pytest.approx(ours(), rel=1e-5)


def logits_of_layers(parameters, torch):
    """Of a model without any layer."""
    from scripts.step_bench.torch_gpt2 import logits_of  # needs PyTorch

    return logits_of(parameters, torch.zeros((1, 4), dtype=torch.long), layers=0, heads=1)


def backward_names(tensor) -> set[str]:
    """What autograd runs for it."""
    seen, nodes = set(), [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        seen.add(type(node).__name__)
        nodes += [before for before, _ in node.next_functions if before is not None]
    return seen


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--vs llmc=train_gpt2cu", "--vs llmc is for --backend cupy"),
        ("--backend cupy --vs llmc=train_gpt2cu --dtype float32", "--vs llmc is for --dtype bfloat16"),
        ("--backend cupy --vs llmc", "llmc: expected torch or llmc=PATH"),
        ("--backend cupy --threads 2", "--threads is for --backend numpy"),
    ],
)
def test_flags_that_do_not_fit(flags, message):
    command = [sys.executable, str(ROOT / "scripts" / "bench_step.py"), *flags.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
