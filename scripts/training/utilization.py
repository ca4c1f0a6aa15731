"""MFU (model FLOPs utilization), and the peak rate that counts as 100%.

MFU is the rate of the model's own operations (gpt2/config.py) divided by the peak rate of all ranks. A rank's peak is
--peak-tflops if given. A GPU's peak is its datasheet's rate for dense bfloat16, even if the model is float32. The peak
of CPU cores is measured when a run starts: the rate of matrix products like those of a step, one per thread. All ranks
measure at the same time, because in a step they share clock, caches and cores. Other load lowers a measured rate, so
the best of several periods counts.
"""

import math
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from dist.waiting import barrier, gather_everywhere
from scripts.machine.gpu import peak_tflops
from traces.units import count_text

MEASURED = "measured"  # the source of a measured peak
# Products (rows, inputs, outputs): a square one, as fast as larger ones but done in milliseconds, and two of a layer.
SHAPES = (512, 512, 512), (256, 768, 768), (768, 256, 768)
PERIODS = 9  # the shapes take turns
PERIOD_S = 0.012


@dataclass(frozen=True)
class PeakRate:
    """The peak rate of the ranks."""

    tflops: list[float | None] | None  # of each rank, None if it computes nothing; None as a whole if one is unknown
    source: str  # where the rates come from, or why they are unknown

    @property
    def flops(self) -> float | None:
        """Operations per second of all computing ranks."""
        return None if self.tflops is None else 1e12 * sum(filter(None, self.tflops))

    def mfu(self, model_flops: float, fastest: float = 0.0) -> dict[str, float | bool]:
        """Return {"mfu"} for a rate in model FLOPs per second, at most 1; {} if the peak is unknown.

        fastest: the highest rate so far. If it exceeds the peak, it replaces the peak, and the result also has
        "peak_underestimated".
        """
        if self.flops is None:
            return {}
        reached = max(model_flops, fastest)
        if reached <= self.flops:
            return {"mfu": model_flops / self.flops}
        return {"mfu": model_flops / reached, "peak_underestimated": True}

    def __str__(self) -> str:
        if self.flops is None:
            return f"not known, so no MFU: {self.source}; give --peak-tflops"
        ranks = sum(rate is not None for rate in self.tflops)
        return f"{self.flops / 1e12:.3g} TFLOP/s for {count_text(ranks, 'rank')} ({self.source}) = 100% MFU"


def find_peak(world, computes: list[bool], told: float | None, cores, gpus: list[dict] | None) -> PeakRate:
    """Find the peak rate of a run, the same on all ranks. Collective.

    computes: for each rank, whether it computes gradients. told: --peak-tflops. gpus: each rank's {"name", "id"}; None
    if the ranks compute on `cores` (gpt2.kernels.numpy.Cores).
    """
    if told is not None:
        return PeakRate([told if computing else None for computing in computes], "--peak-tflops")
    if gpus is not None:
        return datasheet_peak(gpus, [place["host"] for place in world.places], computes)
    return measured_peak(world, computes, cores)


def measured_peak(world, computes: list[bool], cores) -> PeakRate:
    """Measure the peak of the ranks' cores (gpt2.kernels.numpy.Cores). Collective.

    The best period is that of all ranks together. Its rate is divided by the ranks' shares over all periods: ranks that
    share a core take turns, so in a single period one of them may have the core to itself.
    """
    barrier(world.comm)
    own = product_rates(cores) / 1e12 if computes[world.rank] else np.full(PERIODS, math.nan)
    rates = gather_everywhere(world.comm, *own)
    means = rates.mean(axis=1)
    shares = means * (np.nansum(rates, axis=0).max() / np.nansum(means))
    return PeakRate([None if math.isnan(rate) else rate for rate in shares.tolist()], MEASURED)


def datasheet_peak(gpus: list[dict], hosts: list[str], computes: list[bool]) -> PeakRate:
    """Return the peak by datasheets. Ranks that share a GPU divide its rate equally."""
    names = {gpu["name"] for gpu, computing in zip(gpus, computes, strict=True) if computing}
    if unknown := sorted(name for name in names if peak_tflops(name) is None):
        return PeakRate(None, f"the datasheet of {unknown[0]} is none of those known here")
    places = [(host, gpu["id"]) for host, gpu in zip(hosts, gpus, strict=True)]
    sharers = Counter(place for place, computing in zip(places, computes, strict=True) if computing)
    tflops = [
        peak_tflops(gpu["name"]) / sharers[place] if computing else None
        for gpu, place, computing in zip(gpus, places, computes, strict=True)
    ]
    return PeakRate(tflops, f"datasheet of {', '.join(sorted(names))}, dense bfloat16")


def product_rates(cores) -> np.ndarray:
    """Measure the FLOP/s of all threads of `cores` (gpt2.kernels.numpy.Cores) in matrix products, (PERIODS,).

    Periods end at fixed times after the start, however long a product takes. So all ranks have the same periods, and no
    rank still computes when others that share its cores are done. A period in which no product ended has rate 0.
    """
    rates = np.zeros((cores.threads, PERIODS))

    def multiply(thread, _):
        dtype = cores.operand_dtype or np.float32
        random = np.random.default_rng(thread)
        factors = []
        for rows, inputs, outputs in SHAPES:
            a = random.standard_normal((rows, inputs), np.float32).astype(dtype)
            b = random.standard_normal((inputs, outputs), np.float32).astype(dtype)
            factors.append((a, b, np.zeros((rows, outputs), np.float32)))
        for a, b, out in factors:
            cores.matmul(a, b, out)  # the first product of each shape may be compiled
        now = begun = time.perf_counter()
        for period in range(PERIODS):
            a, b, out = factors[period % len(SHAPES)]
            since = now
            products = 0
            stop = begun + (period + 1) * PERIOD_S
            while now < stop:
                cores.matmul(a, b, out)
                products += 1
                now = time.perf_counter()
            flops = products * 2 * math.prod(SHAPES[period % len(SHAPES)])
            rates[thread, period] = flops / (now - since) if products else 0.0

    cores.for_parts(cores.threads, multiply)
    return rates.sum(axis=0)
