"""scripts/training/utilization.py: whose peak MFU is a part of, and what a training run says of it."""

import json
import threading
from types import SimpleNamespace

import pytest

from gpt2.kernels.numpy import Cores
from scripts.training import utilization
from scripts.training.utilization import PERIODS, PRODUCT_SIZE, Peak, datasheet_peak, product_rate
from tests.support.in_process import log
from tests.support.in_process import train as train_here

SMALL = ["--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--context", 16, "--steps", 2, "--eval-every", 0]
PARAMETERS = 256 * 16 + 16 * 16 + (12 * 16**2 + 13 * 16) + 2 * 16
FLOPS_PER_TOKEN = 6 * PARAMETERS + 6 * 1 * 16 * 16


@pytest.mark.parametrize("threads", [1, 3])
def test_the_rate_is_the_threads_products_over_their_time(threads, monkeypatch):
    """On a clock of each thread's own that goes on by 5 ms a look: three products are beyond a period of 12 ms."""
    clocks, products = threading.local(), []

    def look():
        clocks.now = getattr(clocks, "now", 0.0) + 0.005
        return clocks.now

    monkeypatch.setattr(utilization.time, "perf_counter", look)
    monkeypatch.setattr(utilization.np, "matmul", lambda a, b, out: products.append((a.shape, b.shape, out.shape)))
    rate = product_rate(Cores(threads))
    assert rate == pytest.approx(threads * 2 * PRODUCT_SIZE**3 / 0.005)
    assert products == threads * PERIODS * 3 * [3 * ((PRODUCT_SIZE, PRODUCT_SIZE),)]


@pytest.mark.any_mpi
@pytest.mark.ranks(1, 3)
def test_what_a_run_says(comm, shared_path, capsys):
    """The peak of each rank that computes, and MFU of their sum by llm.c's count."""
    from dist.world import start_world

    world, run = start_world(), shared_path / "run"
    server = ["--strategy", "reduce-bcast", "--server", "dedicated"] if world.size > 1 else []
    train_here(world, run, *SMALL, *server)
    peak = json.loads((run / "config.json").read_text())["peak"]
    assert peak["source"] == "measured"
    if world.size > 1:
        assert peak["tflops"].pop(0) is None
    assert len(peak["tflops"]) == max(1, world.size - 1)
    assert all(rate > 0 for rate in peak["tflops"])
    for line in log(run):
        mfu = line["tokens_per_s"] * FLOPS_PER_TOKEN / (1e12 * sum(peak["tflops"]))
        assert line["mfu"] == pytest.approx(mfu, rel=1e-12)

    capsys.readouterr()
    train_here(world, shared_path / "told", *SMALL, *server, "--peak-tflops", 0.25)
    config = json.loads((shared_path / "told" / "config.json").read_text())
    workers = max(1, world.size - 1)
    assert config["peak"] == {"tflops": [None] * (world.size > 1) + [0.25] * workers, "source": "--peak-tflops"}
    for line in log(shared_path / "told"):
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * FLOPS_PER_TOKEN / (0.25e12 * workers), rel=1e-12)
    table = f"peak          {0.25 * workers} TFLOP/s of {workers} ranks (--peak-tflops): MFU's 100%\n"
    assert world.rank or table in capsys.readouterr().out


def gpu(name, number):
    return {"name": name, "id": str(number)}


def test_the_datasheets_of_gpus():
    h200, a100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
    peak = datasheet_peak([gpu(h200, 0), gpu(h200, 1), gpu(a100, 0)], ["a", "a", "b"], [True] * 3)
    assert peak == Peak([990, 990, 312], f"datasheet of {a100}, {h200}, dense bfloat16")
    assert peak.mfu(229.2e12) == {"mfu": pytest.approx(0.1)}
    peak = datasheet_peak([gpu(h200, 0)] * 3, ["a", "a", "b"], [True] * 3)
    assert peak.tflops == [495, 495, 990], "two share one"
    peak = datasheet_peak([gpu(h200, 0)] * 3, ["a"] * 3, [False, True, True])
    assert peak.tflops == [None, 495, 495], "the server computes nothing"


def test_a_gpu_that_is_not_known_has_no_mfu():
    """Not even where others are known, but it counts for nothing where it computes nothing."""
    gpus = [gpu("NVIDIA H200", 0), gpu("Quadro", 1)]
    peak = datasheet_peak(gpus, ["a", "a"], [True, True])
    assert (peak.tflops, peak.mfu(1e12)) == (None, {})
    assert str(peak) == "not known, so no MFU: the datasheet of Quadro is none of those known here; give --peak-tflops"
    assert datasheet_peak(gpus[::-1], ["a", "a"], [False, True]).tflops == [None, 990]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast"])
def test_a_peak_is_a_number_above_0(text, monkeypatch, capsys):
    from scripts.settings import training

    monkeypatch.setattr(training, "start_mpi", lambda: SimpleNamespace(rank=0))
    with pytest.raises(SystemExit) as ended:
        training.parse_settings("", ["--peak-tflops", text])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert f"argument --peak-tflops: '{text}' is not a number above 0" in line
    assert line.count("\n") == 1
