"""What a run says of each step: a record for log.jsonl and, where it is time for one, a progress line.

A line says where the run is, what it learns, how fast, and when it will have made all its steps.
"""

import time

import numpy as np

from scripts.training.meeting import RankReports
from traces.units import duration_text, mfu_text, short_ms

SECONDS_BETWEEN_LINES = 1.0
STANDS_OUT = 0.15  # a rank is named if it is slower than the others by this share
WARM_UP_STEPS = 2  # in these caches and compilers differ, not ranks
MEMORY_GROWTH = 1.01  # less is not worth a word


class StepRecords:
    """Makes the lines of log.jsonl. tokens: of a step, by all workers. utilization: a Utilization.

    stages: of each rank, the stage of the pipeline; all 0 without one.
    """

    def __init__(self, tokens: int, flops_per_token: float, utilization, stages: list[int]):
        self.tokens, self.flops_per_token, self.utilization = tokens, flops_per_token, utilization
        self.stages = stages
        self._noted = {}

    def of_step(self, step: int, reports: RankReports, norm: float, lr: float, step_s: float, skipped: bool) -> dict:
        """norm: of the gradients, before clipping. skipped: whether the update was left out, as the norm stands out."""
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
        record |= self.utilization.of_step(self.tokens * self.flops_per_token / step_s)
        record |= {"skipped": True} if skipped else {}
        record |= {"pipeline_wait_s": float(np.mean(reports.pipeline_s))} if any(self.stages) else {}
        return record | self._memory(reports) | slowest(reports.compute_s, self.stages)

    def _memory(self, reports: RankReports) -> dict[str, int]:
        """{"peak_memory_bytes", "gpu_memory_bytes"}: of the rank that has most, where that has grown."""
        now = {"peak_memory_bytes": int(max(reports.memory_bytes)), "gpu_memory_bytes": int(max(reports.gpu_bytes))}
        grown = {name: size for name, size in now.items() if size > MEMORY_GROWTH * self._noted.get(name, 0)}
        self._noted |= grown
        return grown


def exposed_exchange_s(reports: RankReports, step_s: float) -> float:
    """Seconds of exchange that nothing hid, the mean over the workers; at most step_s, those of rank 0's step.

    A worker that begins the step before rank 0 waits for it in an exchange: rank 0 still prints, or writes its log.
    These seconds lie between rank 0's steps, so they are none of this one's.
    """
    exchange, step, is_worker = np.array(reports.exchange_s), np.array(reports.step_s), np.isfinite(reports.compute_s)
    within = np.maximum(0.0, exchange - np.maximum(0.0, step - step_s))
    return float(within[is_worker].mean())


def slowest(compute_s, stages: list[int]) -> dict[str, float]:
    """{"slowest_rank", "slowest_excess"}: of the ranks that took longest for their gradients in their stage, the one
    that stands out most, and by which share it took longer than the median of the stage's others; {} if no stage has
    two ranks that compute.

    compute_s: for each rank its seconds, nan if it computes nothing. stages: of each rank; stages differ by design.
    """
    seconds, found = np.asarray(compute_s), {}
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
    """Rank 0 prints a line each `every` steps; None: a line a step, but at most one a second.

    The first, the last and validated steps always get one.

    A line names a rank that was clearly slower than the others in the steps since the line before. places: World's.
    stages: as slowest's. job_end: when the job's time limit ends it, in seconds since 1970; None where none is known.
    left_s: says in how many seconds the run ends wherever it stands; None where it does not.
    """

    def __init__(
        self, last_step: int, print_line, places: list[dict], stages: list[int], every: int | None = None,
        job_end: float | None = None, left_s=lambda: None,
    ):  # fmt: skip
        self.last_step, self.print_line, self.places, self.printed_at = last_step, print_line, places, 0.0
        self.compute_s, self.stages, self.every = [], stages, every
        self.pace = Pace(last_step, job_end, left_s)

    def step(self, record: dict, compute_s: list[float]) -> None:
        """record: as StepRecords makes it, with "val_loss" after a validation. compute_s: as slowest's."""
        if record["step"] > WARM_UP_STEPS:
            self.compute_s.append(compute_s)
        now, times = time.monotonic(), self.pace.text(record["step"])
        always = "val_loss" in record or "skipped" in record or record["step"] in (1, self.last_step)
        is_due = record["step"] % self.every == 0 if self.every else now - self.printed_at >= SECONDS_BETWEEN_LINES
        if not is_due and not always:
            return
        self.printed_at = now
        step = f"step {record['step']:>{len(str(self.last_step))}}/{self.last_step}"
        skipped = "  SKIPPED, the norm stands out" if "skipped" in record else ""
        mfu = f"  MFU {mfu_text(record['mfu'], 'peak_underestimated' in record)}" if "mfu" in record else ""
        exchange = record["exposed_exchange_s"] / record["step_s"]
        pipeline = (
            f"  pipeline {record['pipeline_wait_s'] / record['step_s']:.0%}" if "pipeline_wait_s" in record else ""
        )
        self.print_line(
            f"{step}  loss {record['loss']:#.5g}  norm {record['grad_norm']:.2f}  lr {record['lr']:.1e}  "
            f"{short_ms(1e3 * record['step_s'], 4)} ms  {record['tokens_per_s']:,.0f} tok/s{mfu}  "
            f"exchange {exchange:.0%}{pipeline}{self._slowest()}{skipped}  {times}"
        )
        if "val_loss" in record:
            self.print_line(f"{'':{len(step)}}  val loss {record['val_loss']:.4f}")  # beneath the loss

    def _slowest(self) -> str:
        """Names the rank whose median over the steps since the last line stands out, if there is one."""
        found = slowest(np.median(self.compute_s, axis=0), self.stages) if self.compute_s else {}
        self.compute_s = []
        if not found or found["slowest_excess"] < STANDS_OUT:
            return ""
        rank = found["slowest_rank"]
        return f"  slowest rank {rank} ({self.places[rank]['host']}) +{found['slowest_excess']:.0%}"


class Pace:
    """How long the steps of this job have taken so far, how long the rest will, and whether that ends in time.

    last_step, job_end, left_s: as ProgressLines'.
    """

    def __init__(self, last_step: int, job_end: float | None = None, left_s=lambda: None):
        self._last_step, self._job_end, self._left_s = last_step, job_end, left_s
        self._begun, self._made, self._warm_at = time.monotonic(), 0, None

    def text(self, step: int) -> str:
        """After each step: "2:05, 1:10 left"; and where the job's time limit comes before that, by how much.

        The first steps count for the time that has passed and not for what is left: they compile.
        """
        now = time.monotonic()
        passed, self._made = duration_text(now - self._begun), self._made + 1
        if self._made <= WARM_UP_STEPS:
            self._warm_at = now
            limit = "" if self._job_end is None else f", job's limit in {duration_text(self._job_end - time.time())}"
            return passed + limit
        left_s = (self._last_step - step) * (now - self._warm_at) / (self._made - WARM_UP_STEPS)
        if (limit_s := self._left_s()) is not None:
            left_s = min(left_s, limit_s)
        return f"{passed}, {duration_text(left_s)} left{self._late(left_s)}" if step < self._last_step else passed

    def _late(self, left_s: float) -> str:
        late_s = 0.0 if self._job_end is None else left_s - (self._job_end - time.time())
        if late_s <= 0:
            return ""
        late = f"{late_s / 60:.0f} min" if late_s < 2 * 3600 else f"{late_s / 3600:.0f} h"
        return f", ends {late} after the job's limit"
