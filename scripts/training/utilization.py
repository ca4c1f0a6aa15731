"""The peak: how many floating-point operations a second the ranks can compute at most.

MFU (model FLOPs utilization) is the share of the peak that the model's own operations reach (gpt2/config.py). A rank's
peak is --peak-tflops if that is given. A GPU's peak is its datasheet's rate for dense bfloat16, even if the model is
float32. The peak of CPU cores is measured: the rate that they reach in float32 products, where each thread computes
products of its own. All ranks measure at once, so that they share clock, caches and cores as they do in a step.
"""

import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from dist.waiting import barrier, gather_everywhere
from scripts.machine.gpu import peak_tflops

PRODUCT_SIZE = 512  # rows and columns: as fast as larger ones, and over in milliseconds
PERIODS, PERIOD_S = 5, 0.012


@dataclass(frozen=True)
class Peak:
    """tflops: for each rank 10**12 operations a second, or None if the rank computes nothing. It is None as a whole if
    the rate of one rank is not known. source: where the rates come from, or why they are not known."""

    tflops: list[float | None] | None
    source: str

    @property
    def flops(self) -> float | None:
        """Operations a second of all ranks that compute."""
        return None if self.tflops is None else 1e12 * sum(filter(None, self.tflops))

    def mfu(self, model_flops: float) -> dict[str, float]:
        """{"mfu"} for that many model FLOPs a second, or {} if the peak is not known."""
        return {} if self.flops is None else {"mfu": model_flops / self.flops}

    def __str__(self) -> str:
        if self.flops is None:
            return f"not known, so no MFU: {self.source}; give --peak-tflops"
        ranks = sum(rate is not None for rate in self.tflops)
        return f"{self.flops / 1e12:.3g} TFLOP/s of {ranks} ranks ({self.source}): MFU's 100%"


def find_peak(world, computes: list[bool], told: float | None, kernels, gpus: list[dict] | None) -> Peak:
    """The peak, the same on all ranks. Collective.

    computes: for each rank, whether it computes gradients. told: --peak-tflops. gpus: for each rank {"name", "id"} of
    its GPU; None if the ranks compute on cores.
    """
    if told is not None:
        return Peak([told if computing else None for computing in computes], "--peak-tflops")
    if gpus is not None:
        return datasheet_peak(gpus, [place["host"] for place in world.places], computes)
    barrier(world.comm)
    own = product_rate(kernels.device) / 1e12 if computes[world.rank] else math.nan
    rates = gather_everywhere(world.comm, own)[:, 0].tolist()
    return Peak([None if math.isnan(rate) else rate for rate in rates], "measured")


def datasheet_peak(gpus: list[dict], hosts: list[str], computes: list[bool]) -> Peak:
    """Ranks that share a GPU each have an equal part of its rate."""
    names = {gpu["name"] for gpu, computing in zip(gpus, computes, strict=True) if computing}
    if unknown := sorted(name for name in names if peak_tflops(name) is None):
        return Peak(None, f"the datasheet of {unknown[0]} is none of those known here")
    places = [(host, gpu["id"]) for host, gpu in zip(hosts, gpus, strict=True)]
    sharers = Counter(place for place, computing in zip(places, computes, strict=True) if computing)
    tflops = [
        peak_tflops(gpu["name"]) / sharers[place] if computing else None
        for gpu, place, computing in zip(gpus, places, computes, strict=True)
    ]
    return Peak(tflops, f"datasheet of {', '.join(sorted(names))}, dense bfloat16")


def product_rate(cores) -> float:
    """FLOP/s of all threads of `cores` (gpt2.kernels.numpy.Cores) in float32 products: the median of PERIODS."""
    rates = np.zeros((cores.threads, PERIODS))

    def multiply(thread, _):
        a, b = np.random.default_rng(thread).standard_normal((2, PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
        out = np.zeros_like(a)
        for period in range(PERIODS):
            rates[thread, period] = _rate(a, b, out)

    cores.for_blocks(cores.threads, 1, multiply)
    return statistics.median(rates.sum(axis=0))


def _rate(a, b, out) -> float:
    """FLOP/s of one product after another for PERIOD_S, but of one at least."""
    begun, products, elapsed_s = time.perf_counter(), 0, 0.0
    while elapsed_s < PERIOD_S:
        np.matmul(a, b, out=out)
        products, elapsed_s = products + 1, time.perf_counter() - begun
    return products * 2 * PRODUCT_SIZE**3 / elapsed_s
