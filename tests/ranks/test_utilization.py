"""scripts/training/utilization.py: whose peak MFU is a part of, and what a training run says of it."""

import json
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from dist.world import start_world
from gpt2.kernels.numpy import Cores
from scripts import diagnose, plot
from scripts.settings import training
from scripts.training import utilization
from scripts.training.utilization import PERIODS, SHAPES, PeakRate, datasheet_peak, product_rates
from tests.support.in_process import log
from tests.support.in_process import train as train_here

SMALL = ["--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--context", 16, "--steps", 2, "--eval-every", 0]
PARAMETERS = 256 * 16 + 16 * 16 + (12 * 16**2 + 13 * 16) + 2 * 16
FLOPS_PER_TOKEN = 6 * PARAMETERS + 6 * 1 * 16 * 16


@pytest.mark.parametrize("threads", [1, 3])
def test_the_rate_is_the_threads_products_over_their_time(threads, monkeypatch):
    """On a clock of each thread's own that goes on by 5 ms a look: a product takes as long, whatever a period's end."""
    clocks, products = threading.local(), []

    def look():
        clocks.now = getattr(clocks, "now", 0.0) + 0.005
        return clocks.now

    monkeypatch.setattr(utilization.time, "perf_counter", look)
    monkeypatch.setattr(utilization.np, "matmul", lambda a, b, out: products.append((*a.shape, out.shape[1])))
    rates = product_rates(Cores(threads))
    expected = [threads * 2 * math.prod(SHAPES[period % len(SHAPES)]) / 0.005 for period in range(PERIODS)]
    assert rates == pytest.approx(expected)
    assert set(products) == set(SHAPES)
    whole = PERIODS * utilization.PERIOD_S / 0.005
    timed = len(products) / threads - len(SHAPES)  # the first of each shape is not
    assert whole <= timed <= whole + 1, "periods follow one another, and end when they must"


def test_a_product_longer_than_all_periods_counts_once(monkeypatch):
    """And leaves no time for others: their rate is 0, not that of a core that other ranks have left."""
    clock = iter(range(100))
    monkeypatch.setattr(utilization.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(utilization.np, "matmul", lambda a, b, out: None)
    assert product_rates(Cores(1)).tolist() == [2.0 * math.prod(SHAPES[0])] + [0] * (PERIODS - 1)


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_the_best_period_of_all_ranks_together_is_the_peak(comm, monkeypatch):
    """Not each rank's own best one, which it may have had a core alone for. 10 of 30 in all, of which one made 16."""
    rates = {0: [1.0, 9.0, 4.0, 2.0], 1: [7.0, 1.0, 5.0, 1.0]}[comm.rank] + [0.0] * (PERIODS - 4)
    monkeypatch.setattr(utilization, "product_rates", lambda cores: 1e12 * np.array(rates))
    peak = utilization.measured_peak(start_world(), [True, True], None)
    assert (peak.tflops, peak.source) == (pytest.approx([10 * 16 / 30, 10 * 14 / 30]), "measured")
    peak = utilization.measured_peak(start_world(), [False, True], None)
    assert peak.tflops == [None, pytest.approx(7.0)]


def test_a_step_above_the_peak_takes_its_place():
    peak = PeakRate([None, 0.5, 0.5], "measured")
    assert peak.mfu(0.4e12) == {"mfu": 0.4}
    assert peak.mfu(1e12, 1e12) == {"mfu": 1.0}, "all of it is no more than it"
    assert peak.mfu(2e12, 2e12) == {"mfu": 1.0, "peak_underestimated": True}
    assert peak.mfu(1e12, 2e12) == {"mfu": 0.5, "peak_underestimated": True}


@pytest.mark.any_mpi
@pytest.mark.ranks(1)
def test_a_run_on_a_peak_that_is_too_low(comm, shared_path, monkeypatch, capsys):
    """Measured on a busy machine: nothing reports more than 100%, and every report says why."""
    monkeypatch.setattr(utilization, "product_rates", lambda cores: np.full(PERIODS, 1e3))
    run = shared_path / "busy"
    train_here(start_world(), run, *SMALL, "--steps", 6, peak=())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ") and "/6 " in line]
    assert lines
    assert all("  MFU at most " in line and "% (peak underestimated)  " in line for line in lines), lines
    assert all(0 < row["mfu"] <= 1 and row["peak_underestimated"] is True for row in log(run))
    peak = json.loads((run / "config.json").read_text())["peak"]
    assert peak == {"tflops": [pytest.approx(1e-9)], "source": "measured"}
    assert plot.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "(peak underestimated)" in page
    assert "MFU, of what the fastest step reached, more than 1e-09 TFLOP/s" in page
    capsys.readouterr()
    assert diagnose.main([str(run)]) == 0
    assert "(peak underestimated)" in capsys.readouterr().out


@pytest.mark.any_mpi
@pytest.mark.ranks(1, 3)
def test_what_a_run_says(comm, shared_path, capsys):
    """The peak of each rank that computes, and MFU of their sum by llm.c's count."""
    world, run = start_world(), shared_path / "run"
    server = ["--strategy", "reduce-bcast", "--server", "dedicated"] if world.size > 1 else []
    train_here(world, run, *SMALL, *server, peak=())
    peak = json.loads((run / "config.json").read_text())["peak"]
    assert peak["source"] == "measured"
    total = sum(filter(None, peak["tflops"]))
    if world.size > 1:
        assert peak["tflops"].pop(0) is None
    assert len(peak["tflops"]) == max(1, world.size - 1)
    assert all(rate > 0 for rate in peak["tflops"])
    for line in log(run):
        if "peak_underestimated" not in line:
            assert line["mfu"] == pytest.approx(line["tokens_per_s"] * FLOPS_PER_TOKEN / (1e12 * total), rel=1e-12)

    capsys.readouterr()
    train_here(world, shared_path / "told", *SMALL, *server, "--peak-tflops", 0.25)
    config = json.loads((shared_path / "told" / "config.json").read_text())
    workers = max(1, world.size - 1)
    assert config["peak"] == {"tflops": [None] * (world.size > 1) + [0.25] * workers, "source": "--peak-tflops"}
    for line in log(shared_path / "told"):
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * FLOPS_PER_TOKEN / (0.25e12 * workers), rel=1e-12)
    ranks = f"{workers} rank{'s' * (workers > 1)}"
    table = f"peak          {0.25 * workers} TFLOP/s for {ranks} (--peak-tflops) = 100% MFU\n"
    assert world.rank or table in capsys.readouterr().out


def gpu(name, number):
    return {"name": name, "id": str(number)}


def test_the_datasheets_of_gpus():
    h200, a100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
    peak = datasheet_peak([gpu(h200, 0), gpu(h200, 1), gpu(a100, 0)], ["a", "a", "b"], [True] * 3)
    assert peak == PeakRate([990, 990, 312], f"datasheet of {a100}, {h200}, dense bfloat16")
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
    monkeypatch.setattr(training, "start_mpi", lambda: SimpleNamespace(rank=0))
    with pytest.raises(SystemExit) as ended:
        training.parse_settings("", ["--peak-tflops", text])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert f"argument --peak-tflops: '{text}' is not a number above 0" in line
    assert line.count("\n") == 1
