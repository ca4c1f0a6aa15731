"""The peak: how many floating-point operations a second the ranks can compute at most.

MFU (model FLOPs utilization) is the share of the peak that the model's own operations reach (gpt2/config.py). A rank's
peak is --peak-tflops if that is given. A GPU's peak is its datasheet's rate for dense bfloat16, even if the model is
float32. The peak of CPU cores is measured: the rate that they reach in float32 products, where each thread computes
products of its own. All ranks measure at once, so that they share clock, caches and cores as they do in a step.

Whatever else the machine does only lowers a measured rate. So the best of several periods counts, they are measured
again when the run ends, and a step that is faster than the peak raises it: then the peak was underestimated.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from dist.waiting import barrier, gather_everywhere
from scripts.machine.gpu import peak_tflops

MEASURED = "measured"  # the source of such a peak
PRODUCT_SIZE = 512  # rows and columns: as fast as larger ones, and over in milliseconds
PERIODS, PERIOD_S = 5, 0.012
NOTICEABLE = 1.1  # a peak that was higher by less is not worth a line at the end


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

    @property
    def is_measured(self) -> bool:
        return self.source == MEASURED

    def mfu(self, model_flops: float, fastest: float = 0.0) -> dict[str, float | bool]:
        """{"mfu"} for that many model FLOPs a second, at most 1; {} if the peak is not known.

        fastest: the most that was reached so far. What is above the peak takes its place, and "peak_underestimated" is
        there, too.
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
    return measured_peak(world, computes, kernels.device)


def measured_peak(world, computes: list[bool], cores) -> Peak:
    """The peak of the ranks' cores (gpt2.kernels.numpy.Cores). Collective.

    All ranks together: the best period. Of it each has the part that it has of all periods: ranks that share a core
    take turns, so in a single period one of them may have it alone.
    """
    barrier(world.comm)
    own = product_rates(cores) / 1e12 if computes[world.rank] else np.full(PERIODS, math.nan)
    rates = gather_everywhere(world.comm, *own)
    means = rates.mean(axis=1)
    shares = means * (np.nansum(rates, axis=0).max() / np.nansum(means))
    return Peak([None if math.isnan(rate) else rate for rate in shares.tolist()], MEASURED)


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


def product_rates(cores) -> np.ndarray:
    """(PERIODS,) FLOP/s of all threads of `cores` (gpt2.kernels.numpy.Cores) in float32 products.

    Periods end at set times after the start, however long a product takes: so all ranks have the same ones, and no rank
    computes on when others, which share its cores, are through. A period in which no product ended has the rate 0.
    """
    rates = np.zeros((cores.threads, PERIODS))

    def multiply(thread, _):
        a, b = np.random.default_rng(thread).standard_normal((2, PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
        out = np.zeros_like(a)
        now = begun = time.perf_counter()
        for period in range(PERIODS):
            since, products, stop = now, 0, begun + (period + 1) * PERIOD_S
            while now < stop:
                np.matmul(a, b, out=out)
                products, now = products + 1, time.perf_counter()
            rates[thread, period] = products * 2 * PRODUCT_SIZE**3 / (now - since) if products else 0.0

    cores.for_blocks(cores.threads, 1, multiply)
    return rates.sum(axis=0)


class Utilization:
    """MFU as the run goes on. peak: of its start. measure: what measures it again, collective; None where nothing does.

    `fastest` is the largest number of model FLOPs a second that a step of this start has reached.
    """

    def __init__(self, peak: Peak, measure: Callable[[], Peak] | None):
        self.peak, self._measure, self.fastest = peak, measure, 0.0

    def of_step(self, model_flops: float) -> dict[str, float | bool]:
        """As Peak.mfu, for a step of that many model FLOPs a second."""
        self.fastest = max(self.fastest, model_flops)
        return self.peak.mfu(model_flops, self.fastest)

    def at_end(self) -> tuple[dict | None, str | None]:
        """(config.json's "peak", a line to print), as after the last step all is known; None where nothing changes.

        Collective. "in_log" is what the log's last lines take for 100%, 10**12 operations a second of all ranks.
        """
        if self.peak.flops is None:
            return None, None
        again = self._measure() if self._measure else self.peak
        best = max(self.peak, again, key=lambda peak: peak.flops)
        in_log = max(sum(filter(None, self.peak.tflops)), self.fastest / 1e12)
        facts = asdict(best) | {"in_log": in_log} if self._measure else None
        if max(best.flops, self.fastest) <= NOTICEABLE * self.peak.flops:
            return facts, None
        seen = f"at the end {again.flops / 1e12:.3g} were measured, " if self._measure else ""
        return facts, (
            f"the peak of {self.peak.flops / 1e12:.3g} TFLOP/s ({self.peak.source}) was underestimated: {seen}the "
            f"fastest step reached {self.fastest / 1e12:.3g}"
        )
