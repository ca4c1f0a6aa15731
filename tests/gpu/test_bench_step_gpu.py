"""bench_step.py --backend cupy on the fake GPU: contenders in processes of their own, the report, the floors."""

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
from gpt2.kernels.cupy import Device, cublaslt
from gpt2.kernels.cupy.attention import attention_backward, attention_forward
from gpt2.kernels.cupy.compile import FOLDER
from gpt2.model import new_model
from gpt2.optimizer import AdamW, AdamWSettings
from gpt2.parameters import Layout
from scripts.machine.gpu import peak_tflops
from scripts.step_bench import gpu_bench, gpu_contenders
from scripts.step_bench.gpu_kernels import ROWS, KernelTimes, launch_work, matmul_work
from scripts.step_bench.gpu_table import floors, groups
from scripts.step_bench.process import ContenderError
from tests.gpu.cuda_shim import fake_cudnn, fake_cupy
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.cuda_shim.shim import KERNEL, Shim, lasting_build

ROOT = Path(__file__).parents[2]
CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=64, context=32, vocab_size=250)
B, T = 2, 32


def settings(**changed):
    default = {"batch_size": B, "seq_len": T, "dtype": "float32", "model": "small", "repeat": 1, "vs": {}}
    return SimpleNamespace(**default | {"peak_tflops": 1.0, "json": None} | changed)


@pytest.fixture
def few_steps(monkeypatch):
    for name in ("STEPS_A_TURN", "WARM_UP_STEPS"):
        monkeypatch.setattr(gpu_bench, name, 1)
    for name in ("apart", "torch-compiled"):
        monkeypatch.delitem(gpu_bench.CONTENDERS, name)


@pytest.mark.usefixtures("few_steps")
def test_the_whole_command(tmp_path, capsys):
    """Ours is measured; cuDNN, which is not there, costs a line, and so does PyTorch, but it was asked for."""
    command = [
        sys.executable,
        str(ROOT / "tests/gpu/on_device/on_fake_gpu.py"),
        str(lasting_build()),
        *gpu_bench.COMMAND[1:],
    ]
    file, rates = tmp_path / "gpu.json", {"copy_bytes": 4096, "matmul_size": 64, "matmul_s": 0.01}
    code = gpu_bench.bench(settings(json=file, vs={"torch": None}), CONFIG, command, rates)
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    ours, cudnn, torch = (report["contenders"][name] for name in ("ours", "cudnn", "torch"))
    assert code == ("error" in torch)
    assert ours["loss"] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.1)
    assert ours["tokens_per_s"] == pytest.approx(B * T / ours["step_s"])
    flops = 6 * Layout(CONFIG).count + 6 * CONFIG.n_layer * CONFIG.n_embd * T
    assert ours["mfu"] == pytest.approx(ours["tokens_per_s"] * flops / 1e12)
    assert "no cuDNN" in cudnn["error"]
    assert re.search(r"attention by cuDNN +not measured: no cuDNN", printed)
    assert report["machine"]["GPU"] == "shim"
    check_rows(report)
    rates = report["rates"]
    assert rates["matmul_flops"] == pytest.approx(15 / 3 * rates["matmul_burst_flops"]), (
        "15 runs in this fake's 1 ms, or 3"
    )
    assert re.search(r"TFLOP/s of a product that goes on \(\d+ in a burst\)", printed)


def check_rows(report):
    """The products' operations are 6 a parameter and token but for what no product reads; every launch has a row."""
    rows, C, N = report["kernels"]["rows"], CONFIG.n_embd, B * T
    products, attention, others = groups(floors(report)).values()
    matrices = CONFIG.n_layer * 12 * C * C + CONFIG.padded_vocab_size * C
    assert sum(row["flops"] for row in products) == 6 * N * matrices
    assert sum(row["flops"] for row in attention) == 7 * B * T * T * C * CONFIG.n_layer
    # Sums of columns are in epilogues, no slower by this fake's clock; a whole model has nothing to add.
    every_row = {row for row, _ in ROWS.values()} - {"column_sums", "add"}
    assert {row["name"] for row in (*attention, *others)} == every_row
    assert rows["adamw"]["bytes"] == 28 * Layout(CONFIG).count
    epilogues = [sum(row["name"].endswith(name) for row in products) for name in ("left_sums", "bias")]
    assert epilogues == [2, 1], "LayerNorms have the others, and gelu_forward fc's bias"
    choices = {choice["work"] for choice in report["kernels"]["choices"]}
    assert choices == {"bias gradient"}, "float32's GELU is not tried"
    assert rows["layernorm_backward"]["launches"] == 2 * (2 * CONFIG.n_layer + 1)


def test_a_datasheet_that_is_too_low_is_said(capsys):
    """A hundred tokens a second, 10 TFLOP/s, of 4: there is no MFU of 250%; and half of that is half."""
    session = gpu_bench.GpuBench(settings(batch_size=1, seq_len=10), CONFIG, [])
    session.report |= {"peak_tflops": 4.0, "flops_per_token": 1e11}
    session.first_losses |= {"ours": 1.0, "apart": 1.0}
    for name, seconds in (("ours", 0.1), ("apart", 0.2)):
        turn = {"step_s": seconds, "memory_bytes": 1, "loss": 1.0}
        session.our_turns = session.our_turns or [turn]
        session._record(name, [turn])
    entries = session.report["contenders"].values()
    assert [entry["mfu"] for entry in entries] == pytest.approx([1.0, 0.5])
    assert all(entry["peak_underestimated"] for entry in entries)
    lines = capsys.readouterr().out.splitlines()
    assert " at most 100% (peak underestimated)  " in lines[0]
    assert " at most 50% (peak underestimated)  " in lines[1]


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("body", "limits", "message"),
    [
        ("print(json.dumps({'error': 'no GPU'}), flush=True)", {}, "no GPU"),
        ("sys.exit(3)", {}, "ours ended with code 3"),
        ("time.sleep(60)", {"FIRST_STEPS_LIMIT_S": 0.1}, "ours: no answer to 'steps' within 0 s"),
        ("time.sleep(60)", {"LIMIT_S": 0}, "the 0 s of this command are used up"),
    ],
)
def test_our_own_failure_ends_the_command(monkeypatch, body, limits, message):
    """What a contender's process says is the error, and so are its silence and the end of the time."""
    for name, limit in limits.items():
        monkeypatch.setattr(gpu_bench, name, limit)
    program = f"import json, sys, time; sys.stdin.readline(); {body}"
    with pytest.raises(ContenderError, match=message):
        gpu_bench.bench(settings(), CONFIG, [sys.executable, "-c", program])


PARTLY_BROKEN = """
import json, sys
answers = {"gpu": {"parameters": 10, "facts": {"GPU": "broken"}},
           "steps": {"step_s": 0.1, "loss": 5.5, "memory_bytes": 1}, "rates": {"error": "out of memory"},
           "kernels": {"phases_ms": {}, "rows": {}, "choices": []}}
for line in sys.stdin:
    print(json.dumps(answers[json.loads(line)["do"]]), flush=True)
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
    gpu_bench.bench(settings(json=file, vs={"torch": None}), CONFIG, [sys.executable, "-c", program + PARTLY_BROKEN])
    contenders = json.loads(file.read_text())["contenders"]
    assert {name for name, entry in contenders.items() if "step_s" in entry} == {"ours", "cudnn", "torch"}


@pytest.mark.usefixtures("few_steps")
def test_a_part_that_fails_costs_a_line(tmp_path, capsys):
    """The table of kernels is not there; the contenders after it are measured. The exit code says so."""
    file = tmp_path / "gpu.json"
    assert gpu_bench.bench(settings(json=file), CONFIG, [sys.executable, "-c", PARTLY_BROKEN]) == 1
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert report["failed"] == {"rates": "out of memory"}
    assert report["contenders"]["cudnn"]["step_s"] == 0.1
    assert re.search(r"its rates +not measured: out of memory", printed)
    assert "this project's kernels" not in printed


def test_a_contender_answers_on_after_an_error():
    program = (
        "from scripts.step_bench.process import serve\n"
        "serve({'x': lambda shape: {'bad': lambda: 1 / 0, 'good': lambda: {'a': 1}}}, 'x', '{}')"
    )
    asked = '{"do": "bad"}\n{"do": "good"}\n'
    result = subprocess.run([sys.executable, "-c", program], input=asked, capture_output=True, text=True, cwd=ROOT)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert answers == [{"error": "ZeroDivisionError: division by zero"}, {"a": 1}]


def test_every_kernel_has_a_row():
    kernels = {name for path in FOLDER.glob("*.cu") for *_, name in KERNEL.findall(path.read_text())}
    assert {name.removesuffix("_64").removesuffix("_128") for name in kernels if "##" not in name} <= set(ROWS)


def test_what_a_kernel_cannot_do_without():
    """At B = 64, T = 1024 and bfloat16, in MB: the figures of llm.c's kernels, counted by hand."""
    N, C = 64 * 1024, 768
    rows, logits, wide = (np.empty(shape, np.uint16) for shape in ((N, C), (N, 50304), (N, 4 * C)))
    row, small = np.empty(N, np.float32), np.empty(C, np.uint16)

    def megabytes(kernel, *arguments):
        return launch_work(kernel, arguments)[1] / 1e6

    layernorm = megabytes("residual_layernorm_forward", rows, rows, row, row, rows, rows, small, small, small, N, C)
    assert layernorm == pytest.approx(403, abs=1)
    assert megabytes("layernorm_backward", rows, row, rows, rows, row, row, small) == pytest.approx(403, abs=1)
    assert megabytes("gelu_backward", wide, wide, 0) == pytest.approx(1208, abs=1)
    assert megabytes("cross_entropy", row, logits, row, 50257, 50304, 1.0, 1) == pytest.approx(13187, abs=2)
    assert megabytes("cross_entropy", row, logits, row, 50257, 50304, 1.0, 0) == pytest.approx(6594, abs=2)
    master, gradients, rounded = (np.empty(1000, dtype) for dtype in (np.float32, np.uint16, np.uint16))
    adamw = [master, master, master, gradients, None, *[0] * 7, 1000, rounded, 0, 0]
    assert megabytes("adamw", *adamw) == pytest.approx(28e-3), "8 bytes of each float32, gradient and parameter 2"


def test_cudnns_attention_has_rows(monkeypatch):
    """Whose launches nobody sees: its two directions, with the bytes and operations of ours."""
    fake_cupy.install(monkeypatch, Shim(lasting_build()))
    fake_cudnn.install(monkeypatch)
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
    device = Device(attention="cudnn")
    qkv, dqkv, out, dout = (device.empty((B, T, width), np.uint16) for width in (192, 192, 64, 64))
    logsumexp, times = device.empty((B, 1, T), np.float32), KernelTimes(device)
    with times.recording():
        attention_forward(device, out, logsumexp, qkv, 1)
        attention_backward(device, dqkv, dout, qkv, out, logsumexp, 1)
    rows = times.rows
    assert {name: row["flops"] for name, row in rows.items()} == {
        "cudnn_forward": 2 * B * T * T * 64,
        "cudnn_backward": 5 * B * T * T * 64,
    }
    assert rows["cudnn_forward"]["bytes"] == out.nbytes + qkv.nbytes + logsumexp.nbytes


def test_a_products_row():
    out, left, right, bias = (np.empty(shape, np.float32) for shape in ((5, 7), (5, 3), (3, 7), (7,)))
    assert matmul_work(out, left, right, {"bias": bias}) == ("product 5 x 7 x 3 + bias", 4 * (35 + 15 + 21 + 7), 210)
    assert matmul_work(out, left, right, {"accumulate": True}) == ("product 5 x 7 x 3, added", 4 * (70 + 36), 210)


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
def test_pytorch_does_our_step(monkeypatch, compiled):
    """Its losses, on a CPU in float32, are those of the model on NumPy; its embedding's backward does not sort."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(gpu_contenders, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    config, shape = CONFIG, {"config": vars(CONFIG), "batch_size": B, "seq_len": T, "dtype": "float32"}
    steps = gpu_contenders.pytorch(shape, compiled)["steps"]
    wte = torch.zeros((config.vocab_size, 8), requires_grad=True)
    backwards = backward_names(logits_of_layers({"wte": wte, "wpe": wte, "lnf_weight": None, "lnf_bias": None}, torch))
    assert "EmbeddingBackward0" in backwards
    assert "IndexBackward0" not in backwards
    model = new_model(config, load_kernels("numpy", 1), B, T)
    model.parameters.flat[:] = gpu_contenders.first_parameters(config).flat
    adamw = AdamWSettings(weight_decay=gpu_contenders.WEIGHT_DECAY)
    optimizer = AdamW(model.kernels, model.parameters.layout, 0, model.parameters.layout.size, adamw)
    ours = gpu_contenders.OurStep(None, model, optimizer, gpu_contenders.first_batch(config, shape))
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
        ("--peak-tflops 990", "--peak-tflops is for --backend cupy"),
    ],
)
def test_flags_that_do_not_fit(flags, message):
    command = [sys.executable, str(ROOT / "scripts" / "bench_step.py"), *flags.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
