"""bench_step.py's peak on CPUs: what its loop computes, what a step needs at least, and what the table makes of it."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.config import PRESETS, GPT2Config
from gpt2.kernels.numpy import avx512_bf16
from scripts.step_bench import cpu_bench, cpu_contenders
from scripts.step_bench.peak import InstructionPeak
from scripts.step_bench.products import least_flops


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_makes_the_operations_that_are_counted(dtype):
    """Every sum gets a product of twos, or two of them, each round: the total says how many there were."""
    peak, rounds, twos = InstructionPeak(dtype), 7, 0x40004000
    by_pairs = dtype == "bfloat16" and avx512_bf16.available()
    assert peak.instruction == ("VDPBF16PS" if by_pairs else "float32 FMA")
    factor = 2.0 if by_pairs else float(np.int32(twos).view(np.float32))
    products = peak.run(rounds, twos) / factor**2  # of one lane
    lanes = peak.flops_a_round * rounds / (2 * products)
    assert lanes == pytest.approx(16 if by_pairs else round(lanes), rel=1e-5)
    assert round(lanes) in (8, 16)
    assert peak.flops(1) > 0


def test_what_no_step_can_do_without():
    """Product by product and pair by pair, three times: forward, and two gradients."""
    config, B, T = GPT2Config(n_layer=2, n_head=2, n_embd=8, context=8, vocab_size=130), 3, 5
    C, operations = 8, 0
    for _, o in product(range(2), (3 * C, C, 4 * C)):
        operations += 3 * 2 * B * T * C * o
    operations += 2 * 3 * 2 * B * T * 4 * C * C + 3 * 2 * B * T * C * 130
    for _, query in product(range(2 * B), range(T)):
        operations += 3 * 2 * 2 * C * (query + 1)
    assert least_flops(config, B, T) == operations


def test_the_peak_in_the_table(monkeypatch):
    """Its best turn counts, beside every contender's median; what nobody's step can be is a line."""
    monkeypatch.setattr(cpu_bench, "machine", dict)

    def turns(*seconds, part="all"):
        facts = {"versions": {}, "environment": {}, "blas": {"library": "openblas", "version": "1", "kernels": "Zen"}}
        facts["blas"] |= {"variables": {}, "instructions": []}
        return [{"step_s": s, "parts": {part: s}, "peak_memory_bytes": 1e9} | facts for s in seconds]

    shape = {"model": "tiny", "batch_size": 1, "seq_len": 8, "threads": 1, "dtype": "bfloat16"}
    settings = SimpleNamespace(**shape, repeat=3)
    results = {"ours": turns(2.0, 2.0, 9.0), "floor": turns(1, 1, 1), "torch": turns(4.0, 4.0, 4.0)}
    report = cpu_bench.summarize(settings, results | {"peak": turns(0.9, 0.5, 0.8, part="VDPBF16PS")})
    assert [c["peak_over_this"] for c in report["contenders"].values()] == [0.25, 0.5, 0.125]
    assert report["peak"]["flops_per_s"] == least_flops(PRESETS["tiny"], 1, 8) / 0.5
    text = cpu_bench.table(report, cpu_bench.CONTENDERS | {"torch": "PyTorch, eager"})
    assert "\n    at most 8.00 x as fast as PyTorch, eager\n" in text
    assert "peak" in cpu_contenders.MAKERS
