"""The peak: how many floating-point operations a second the ranks can compute at most.

MFU (model FLOPs utilization) is the share of the peak that the model's own operations reach (gpt2/config.py). A rank's
peak is --peak-tflops if that is given. A GPU's peak is its datasheet's rate for dense bfloat16, even if the model is
float32. The peak of CPU cores is measured: the rate that they reach in products as the step makes them, where each
thread computes products of its own. All ranks measure at once, so that they share clock, caches and cores as they do in
a step.

It is measured once for each shape of a job on a machine, and kept there (scripts/machine/kept.py): so runs that are
compared are parts of one peak. A job's shape is in it, as ranks that share cores reach less. Whatever else the machine
does only lowers a measured rate. So the best of several periods counts. The end of each run measures again, which
nobody waits for; where that is clearly more, or a step was faster, the kept peak is raised.
"""

import math
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from dist.control_groups import cpu_quota
from dist.waiting import barrier, gather_everywhere
from scripts.machine import kept
from scripts.machine.blas import L2_SIZE
from scripts.machine.gpu import peak_tflops

MEASURED = "measured"  # the source of such a peak
# Of products (rows, inputs, outputs): a square one, as fast as larger ones and over in milliseconds, and of a layer.
SHAPES = (512, 512, 512), (256, 768, 768), (768, 256, 768)
PERIODS, PERIOD_S = 9, 0.012  # the shapes take turns
NOTICEABLE = 1.1  # a second measurement that is higher by less says nothing new
KEPT = "peak"


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


def new_utilization(world, computes: list[bool], told: float | None, cores, gpus: list[dict] | None, blas: dict):
    """The Utilization of a run, the same on all ranks. Collective.

    computes: for each rank, whether it computes gradients. told: --peak-tflops. gpus: for each rank {"name", "id"} of
    its GPU; None if the ranks compute on `cores` (gpt2.kernels.numpy.Cores). blas: this rank's, as blas_facts has it.
    """
    if told is not None:
        return Utilization(Peak([told if computing else None for computing in computes], "--peak-tflops"))
    if gpus is not None:
        return Utilization(datasheet_peak(gpus, [place["host"] for place in world.places], computes))
    measure, facts = partial(measured_peak, world, computes, cores), node_facts(world, computes, cores, blas)
    return Utilization(kept_peak(world, facts, measure), measure, partial(keep_peak, world, facts))


def node_facts(world, computes: list[bool], cores, blas: dict) -> dict:
    """What the rates of this node's ranks depend on; also on the other nodes, which may be virtual ones beside it."""
    own = [computes[place["rank"]] for place in world.places if place["node"] == world.node]
    kernels = {name: blas[name] for name in ("library", "version", "kernels", "processor", "instructions")}
    return {
        "host": world.host, **kernels, L2_SIZE: blas["variables"].get(L2_SIZE), "products": cores.how,
        "threads": cores.threads, "computes": own, "ranks": world.size, "nodes": world.node_count,
        "cores": len(os.sched_getaffinity(0)), "quota": cpu_quota(),
    }  # fmt: skip


def kept_peak(world, facts: dict, measure) -> Peak:
    """The peak that the nodes have kept, or measure() where one of them has none. Collective. facts: node_facts."""
    is_usable = partial(_fits, facts["computes"])
    answer = kept.read(kept.place_of(KEPT, facts), facts, is_usable) if world.local_rank == 0 else None
    answer = world.local_comm.bcast(answer)
    rates = world.comm.allgather(answer and answer["tflops"][world.local_rank])
    if all(world.comm.allgather(answer is not None)):
        return Peak(rates, MEASURED)
    peak = measure()
    keep_peak(world, facts, peak)
    return peak


def keep_peak(world, facts: dict, peak: Peak, fastest: float = 0.0) -> None:
    """Keep it on each node, not below what rank 0's fastest step reached: model FLOPs a second. Collective.

    What is kept only grows: another run may have raised it since.
    """
    raised = max(1.0, world.comm.bcast(fastest) / peak.flops)
    if world.local_rank == 0:
        rates = [peak.tflops[place["rank"]] for place in world.places if place["node"] == world.node]
        own, path = [rate and rate * raised for rate in rates], kept.place_of(KEPT, facts)
        before = kept.read(path, facts, partial(_fits, facts["computes"])) or {"tflops": []}
        if sum(filter(None, own)) > sum(filter(None, before["tflops"])):
            kept.write(path, facts, {"tflops": own})


def _fits(computes: list[bool], answer: dict) -> bool:
    """Whether a kept answer has a rate for each local rank that computes, and none for the others."""
    rates = answer["tflops"]
    is_rate = [type(rate) is float and 0 < rate < math.inf for rate in rates]
    return is_rate == computes and all(rate is None for rate in rates if type(rate) is not float)


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
    """(PERIODS,) FLOP/s of all threads of `cores` (gpt2.kernels.numpy.Cores) in its products.

    Periods end at set times after the start, however long a product takes: so all ranks have the same ones, and no rank
    computes on when others, which share its cores, are through. A period in which no product ended has the rate 0.
    """
    rates = np.zeros((cores.threads, PERIODS))

    def multiply(thread, _):
        dtype = cores.operand_dtype or np.float32
        factors = [_factors(np.random.default_rng(thread), dtype, *shape) for shape in SHAPES]
        for a, b, out in factors:
            cores.matmul(a, b, out)  # the first product of a kind may be compiled
        now = begun = time.perf_counter()
        for period in range(PERIODS):
            a, b, out = factors[period % len(SHAPES)]
            since, products, stop = now, 0, begun + (period + 1) * PERIOD_S
            while now < stop:
                cores.matmul(a, b, out)
                products, now = products + 1, time.perf_counter()
            flops = products * 2 * math.prod(SHAPES[period % len(SHAPES)])
            rates[thread, period] = flops / (now - since) if products else 0.0

    cores.for_blocks(cores.threads, 1, multiply)
    return rates.sum(axis=0)


def _factors(random, dtype, rows: int, inputs: int, outputs: int) -> tuple:
    """a, b of that dtype, and a place for a @ b."""
    a, b = (random.standard_normal(shape, np.float32).astype(dtype) for shape in ((rows, inputs), (inputs, outputs)))
    return a, b, np.zeros((rows, outputs), np.float32)


class Utilization:
    """MFU as the run goes on. peak: of its start. measure: what measures it again, and keep: what keeps it for later
    runs, as keep_peak does; both collective, and None where the peak is not measured.

    `fastest` is the largest number of model FLOPs a second that a step of this start has reached.
    """

    def __init__(self, peak: Peak, measure=None, keep=None):
        self.peak, self._measure, self._keep, self.fastest = peak, measure, keep, 0.0

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
        best = again if again.flops > NOTICEABLE * self.peak.flops else self.peak
        in_log = max(sum(filter(None, self.peak.tflops)), self.fastest / 1e12)
        facts = asdict(best) | {"in_log": in_log} if self._measure else None
        if self._keep:
            self._keep(best, self.fastest)
        if best is self.peak and self.fastest <= self.peak.flops:
            return facts, None
        seen = f"at the end {again.flops / 1e12:.3g} were measured, " if self._measure else ""
        later = f"; later runs take {max(best.flops, self.fastest) / 1e12:.3g}" if self._keep else ""
        return facts, (
            f"the peak of {self.peak.flops / 1e12:.3g} TFLOP/s ({self.peak.source}) was underestimated: {seen}the "
            f"fastest step reached {self.fastest / 1e12:.3g}{later}"
        )
