"""The record of each step for log.jsonl, and the progress lines on the terminal."""

import time
from dataclasses import dataclass, field

import numpy as np

from scripts.training.meeting import RankReports
from traces.units import duration_text, mfu_text, short_ms

SECONDS_BETWEEN_LINES = 1.0
STANDS_OUT = 0.15  # a rank is named if it is slower than the others by this fraction
WARM_UP_STEPS = 2  # in these steps caches and compilers differ, not ranks
MEMORY_GROWTH = 1.01  # smaller growth is not logged


@dataclass
class StepRecords:
    """Makes the records of log.jsonl."""

    tokens: int  # per step, all workers together
    flops_per_token: float
    peak: object  # a PeakRate
    stages: list[int]  # the pipeline stage of each rank; all 0 without a pipeline
    fastest: float = 0.0  # model FLOPs per second of the fastest step so far
    _noted: dict[str, int] = field(default_factory=dict)

    def of_step(self, step: int, reports: RankReports, norm, lr: float, step_s: float, skipped: bool) -> dict:
        """Return the step's record. norm: of the gradients before clipping, or None. skipped: nothing was updated."""
        record = {
            "step": step,
            "loss": reports.loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": step * self.tokens,
            "step_s": step_s,
            "tokens_per_s": self.tokens / step_s,
            "exposed_exchange_s": exposed_exchange_s(reports, step_s),
        }
        model_flops = self.tokens * self.flops_per_token / step_s
        self.fastest = max(self.fastest, model_flops)
        record |= self.peak.mfu(model_flops, self.fastest)
        record |= {"skipped": True} if skipped else {}
        record |= {"pipeline_wait_s": float(np.mean(reports.pipeline_s))} if any(self.stages) else {}
        return record | self._memory(reports) | slowest(reports.compute_s, self.stages)

    def _memory(self, reports: RankReports) -> dict[str, int]:
        """Return "peak_memory_bytes" and "gpu_memory_bytes", the maximum over ranks, if they have grown."""
        now = {"peak_memory_bytes": int(max(reports.memory_bytes)), "gpu_memory_bytes": int(max(reports.gpu_bytes))}
        grown = {name: size for name, size in now.items() if size > MEMORY_GROWTH * self._noted.get(name, 0)}
        self._noted |= grown
        return grown


def exposed_exchange_s(reports: RankReports, step_s: float) -> float:
    """Return the seconds of exposed exchange, the mean over the workers; at most step_s, rank 0's step.

    A worker may begin the step while rank 0 still prints or writes its log, and then wait for rank 0 in an exchange.
    These seconds lie between rank 0's steps, so they do not count.
    """
    exchange = np.array(reports.exchange_s)
    step = np.array(reports.step_s)
    is_worker = np.isfinite(reports.compute_s)
    within = np.maximum(0.0, exchange - np.maximum(0.0, step - step_s))
    return float(within[is_worker].mean())


def slowest(compute_s, stages: list[int]) -> dict[str, float]:
    """Return {"slowest_rank", "slowest_excess"}: the rank that computes longest relative to others of its stage.

    The excess is relative to the median of the stage's other ranks, because stages differ by design. {} if no stage has
    two computing ranks. compute_s: each rank's seconds of computing gradients, nan if none. stages: of each rank.
    """
    seconds = np.asarray(compute_s)
    found = {}
    for stage in sorted(set(stages)):
        own = np.where(np.asarray(stages) == stage, seconds, np.nan)
        if np.isfinite(own).sum() < 2:
            continue
        rank = int(np.nanargmax(own))
        others = np.nanmedian(np.delete(own, rank))
        excess = float(own[rank] / others - 1) if others > 0 else 0.0
        if not found or excess > found["slowest_excess"]:
            found = {"slowest_rank": rank, "slowest_excess": excess}
    return found


class ProgressLines:
    """Prints progress on rank 0: a line every `every` steps; None: a line per step, but at most one per second.

    The first step, the last step and validated steps always get a line. A line names a rank that was clearly slower
    than the others since the previous line. places: World.places. stages: see `slowest`.
    """

    def __init__(self, pace: "Pace", print_line, places: list[dict], stages: list[int], every: int | None = None):
        self.pace = pace
        self.last_step = pace.last_step
        self.print_line = print_line
        self.places = places
        self.printed_at = 0.0
        self.compute_s = []
        self.stages = stages
        self.every = every

    def step(self, record: dict, compute_s: list[float]) -> None:
        """Print a line if one is due. record: with "val_loss" after a validation. compute_s: see `slowest`."""
        if record["step"] > WARM_UP_STEPS:
            self.compute_s.append(compute_s)
        now = time.monotonic()
        times = self.pace.text(record["step"])
        always = "val_loss" in record or "skipped" in record or record["step"] in (1, self.last_step)
        is_due = record["step"] % self.every == 0 if self.every else now - self.printed_at >= SECONDS_BETWEEN_LINES
        if not is_due and not always:
            return
        self.printed_at = now
        step = f"step {record['step']:>{len(str(self.last_step))}}/{self.last_step}"
        skipped = "  SKIPPED, the norm stands out" if "skipped" in record else ""
        mfu = f"  MFU {mfu_text(record['mfu'], 'peak_underestimated' in record)}" if "mfu" in record else ""
        exchange = record["exposed_exchange_s"] / record["step_s"]
        waits = record.get("pipeline_wait_s")
        pipeline = "" if waits is None else f"  pipeline {waits / record['step_s']:.0%}"
        self.print_line(
            f"{step}  loss {record['loss']:#.5g}  norm {record['grad_norm']:.2f}  lr {record['lr']:.1e}  "
            f"{short_ms(1e3 * record['step_s'], 4)} ms  {record['tokens_per_s']:,.0f} tok/s{mfu}  "
            f"exchange {exchange:.0%}{pipeline}{self._slowest()}{skipped}  {times}"
        )
        if "val_loss" in record:
            self.print_line(f"{'':{len(step)}}  val loss {record['val_loss']:.4f}")  # beneath the loss

    def _slowest(self) -> str:
        """Name a rank whose median compute time since the last line stands out; "" if there is none."""
        found = slowest(np.median(self.compute_s, axis=0), self.stages) if self.compute_s else {}
        self.compute_s = []
        if not found or found["slowest_excess"] < STANDS_OUT:
            return ""
        rank = found["slowest_rank"]
        return f"  slowest rank {rank} ({self.places[rank]['host']}) +{found['slowest_excess']:.0%}"


class Pace:
    """Estimates the time of the remaining steps, and whether they end before the job's time limit.

    job_end: when the job reaches its time limit, in seconds since 1970; None if unknown. left_s(): seconds until
    --minutes end the run; None without a limit.
    """

    def __init__(self, last_step: int, job_end: float | None = None, left_s=lambda: None):
        self.last_step = last_step
        self._job_end = job_end
        self._left_s = left_s
        self._begun = time.monotonic()
        self._made = 0
        self._warm_at = None

    def text(self, step: int) -> str:
        """Return "2:05, 1:10 left" after each step, and by how much the run exceeds the job's time limit, if it does.

        The first steps, which compile kernels, do not count for the estimate.
        """
        now = time.monotonic()
        passed = duration_text(now - self._begun)
        self._made += 1
        if self._made <= WARM_UP_STEPS:
            self._warm_at = now
            limit = "" if self._job_end is None else f", job's limit in {duration_text(self._job_end - time.time())}"
            return passed + limit
        left_s = (self.last_step - step) * (now - self._warm_at) / (self._made - WARM_UP_STEPS)
        if (limit_s := self._left_s()) is not None:
            left_s = min(left_s, limit_s)
        text = f"{passed}, {duration_text(left_s)} left"
        late_s = 0.0 if self._job_end is None else left_s - (self._job_end - time.time())
        if late_s > 0:
            late = f"{late_s / 60:.0f} min" if late_s < 2 * 3600 else f"{late_s / 3600:.0f} h"
            text += f", ends {late} after the job's limit"
        return text if step < self.last_step else passed
