"""Candidates of bench_step.py --backend cupy on the stand-ins: today's results; a wrong one gets no time."""

import shutil
import sys
from dataclasses import asdict, replace

import pytest

from gpt2.config import GPT2Config
from gpt2.kernels.cupy import Device, launch
from scripts.step_bench import gpu_candidates, gpu_contenders
from scripts.step_bench.gpu_candidates import CANDIDATES, measured
from scripts.step_bench.process import ContenderError
from tests.gpu.cuda_shim import fake_cudnn
from tests.gpu.cuda_shim.shim import lasting_build
from tests.gpu.on_device.on_fake_gpu import install
from tests.support.fake_stream import FakeDevice
from traces.record import stream_times

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=128, context=70, vocab_size=250)
B, T = 2, 70
KERNELS = {"attention_three_blocks": 2, "cudnn_any_order": 2, "layernorm_kept": 5}  # and how many a step has
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU shim needs g++")


@pytest.fixture
def new_contender(monkeypatch):
    """new_contender(storage, ...)(name, turns): what our contender's process on the fake GPU answers of a candidate."""
    install(monkeypatch, lasting_build())
    fake_cudnn.install(monkeypatch)

    def new(storage="bfloat16", **changed):
        config = asdict(replace(CONFIG, **changed))
        return gpu_contenders.ours({"config": config, "batch_size": B, "seq_len": T, "dtype": storage})["candidate"]

    return new


@needs_compiler
def test_every_kernel_agrees_with_todays(monkeypatch, new_contender):
    """On values that differ from array to array; and both ran. cuDNN's order is free in the candidate alone."""
    launched, own_launch = set(), Device.launch

    def launch_noted(self, source, storage, kernel, *arguments):
        launched.add(kernel)
        own_launch(self, source, storage, kernel, *arguments)

    monkeypatch.setattr(Device, "launch", launch_noted)
    candidate = new_contender()
    assert {*KERNELS, "anchors"} == set(CANDIDATES)
    for name, a_step in KERNELS.items():
        result = candidate(name, turns=3)
        assert result["a_step"] == a_step
        assert result["difference"] < 2**-8
        assert result["today_over_candidate"] == 1.0, "by this fake's clock"
    assert fake_cudnn.Graph.deterministic == [True, False]
    assert launched >= {"attention_forward_64", "attention_forward_three_blocks_64"}
    assert launched >= {"layernorm_backward", "layernorm_backward_kept"}


@needs_compiler
@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_wrong_candidate_gets_no_time(monkeypatch, new_contender, wrong):
    """Also where one of its results alone is wrong."""

    def kept(device, dinputs, *others):
        launch.layernorm_backward(device, dinputs, *others)
        dinputs.fill(wrong)

    monkeypatch.setattr(launch, "layernorm_backward_kept", kept)
    with pytest.raises(ContenderError, match=r"differs from today's by (1|nan), expected at most 0\.02"):
        new_contender()("layernorm_kept", turns=1)


@pytest.mark.parametrize(
    ("name", "storage", "changed", "message"),
    [
        ("attention_three_blocks", "bfloat16", {"n_head": 1}, "heads of 128 in bfloat16, expected 64 in bfloat16"),
        ("attention_three_blocks", "float32", {}, "heads of 64 in float32, expected 64 in bfloat16"),
        ("cudnn_any_order", "float32", {}, "cuDNN's attention in float32, expected bfloat16"),
        ("layernorm_kept", "float32", {"n_head": 7, "n_embd": 448}, "448 channels, expected a multiple of 4 up to 384"),
    ],
)
def test_what_a_candidate_is_not_for(new_contender, name, storage, changed, message):
    with pytest.raises(ContenderError, match=message):
        new_contender(storage, **changed)(name, turns=1)


def test_cudnn_that_is_missing(monkeypatch, new_contender):
    candidate = new_contender()
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(ContenderError, match="no cuDNN"):
        candidate("cudnn_any_order", turns=1)


class TimedStep:
    """A step of 10 ms on a GPU that lags behind its host, whose clock is the test's."""

    def __init__(self):
        self.device = FakeDevice()

    def run(self, phase):
        for name, ms in (("forward", 3), ("backward", 6), ("update", 1)):
            with phase(name):
                self.device.queue(ms)


@pytest.fixture
def timed_step(monkeypatch):
    step = TimedStep()
    monkeypatch.setattr(stream_times, "perf_counter_ns", step.device.now)
    monkeypatch.setattr(gpu_candidates, "perf_counter", lambda: step.device.now() / 1e9)
    return step


def test_fewer_anchors_are_fewer_waits(timed_step):
    """Of 7 us a step that anchors take here, by the simulated host's calls, seven steps in eight have none."""
    result = measured(timed_step, "anchors", turns=3, anchor_every=8)
    assert result["a_step"] == 1
    assert result["difference"] < 1e-3
    assert result["today_ms"] - result["candidate_ms"] == pytest.approx(7 / 8 * 7e-3, rel=0.05)


def test_anchors_that_shift_phases_are_wrong(timed_step):
    """The clocks drift apart by a tenth: after seven steps phases are off."""
    timed_step.device.rate = 1.1
    with pytest.raises(ContenderError, match="differs from today's"):
        measured(timed_step, "anchors", turns=1, anchor_every=8)
