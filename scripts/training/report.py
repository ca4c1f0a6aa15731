"""What rank 0 prints: every setting once as a table, a line a step (once a second at most), the end."""

import time
from dataclasses import fields
from itertools import zip_longest

import numpy as np

from traces.units import mfu_text, short_ms

SECONDS_BETWEEN_LINES = 1.0
STANDS_OUT = 0.15  # slower than the others by that part
WARM_UP_STEPS = 2  # in which caches and compilers, not ranks, differ


def settings_table(settings, facts: dict[str, str]) -> str:
    """All settings and the facts that follow from them, aligned, in two columns."""
    rows = [(item.name.replace("_", "-"), getattr(settings, item.name)) for item in fields(settings)]
    cells = [f"{name:<13} {'-' if value is None else value!s:<22}" for name, value in rows]
    half = -(-len(cells) // 2)
    lines = [f"{left} {right}".rstrip() for left, right in zip_longest(cells[:half], cells[half:], fillvalue="")]
    return "\n".join([*(f"{name:<13} {value}" for name, value in facts.items()), "", *lines, ""])


def slowest(compute_s) -> dict[str, float]:
    """{"slowest_rank", "slowest_excess"}: who took longest for its gradients, and by which part longer than the median
    of the others. compute_s: seconds by rank, nan of a rank that computes nothing; {} with fewer than two that do."""
    seconds = np.asarray(compute_s)
    if np.isfinite(seconds).sum() < 2:
        return {}
    rank = int(np.nanargmax(seconds))
    others = np.nanmedian(np.delete(seconds, rank))
    return {"slowest_rank": rank, "slowest_excess": float(seconds[rank] / others - 1) if others > 0 else 0.0}


class Progress:
    """Progress lines of rank 0; the first, the last and the validated steps are always printed.

    A rank that was clearly slower than the others in the steps since the last line is named. places: each rank's host.
    """

    def __init__(self, steps: int, print_line, places: list[dict]):
        self.steps, self.print_line, self.places, self.printed_at = steps, print_line, places, 0.0
        self.compute_s = []

    def step(self, record: dict, compute_s: list[float]) -> None:
        """compute_s: by rank, the seconds of this step's gradients, nan of a rank that computes none."""
        if record["step"] > WARM_UP_STEPS:
            self.compute_s.append(compute_s)
        now = time.monotonic()
        always = "val_loss" in record or "skipped" in record or record["step"] in (1, self.steps)
        if now - self.printed_at < SECONDS_BETWEEN_LINES and not always:
            return
        self.printed_at = now
        step = f"step {record['step']:>{len(str(self.steps))}}/{self.steps}"
        skipped = "  SKIPPED, the norm stands out" if "skipped" in record else ""
        mfu = f"  MFU {mfu_text(record['mfu'])}" if "mfu" in record else ""
        exchange = record["exposed_exchange_s"] / record["step_s"]
        self.print_line(
            f"{step}  loss {record['loss']:#.5g}  norm {record['grad_norm']:.2f}  lr {record['lr']:.1e}  "
            f"{short_ms(1e3 * record['step_s'], 4)} ms  {record['tokens_per_s']:,.0f} tok/s{mfu}  "
            f"exchange {exchange:.0%}{self._slowest()}{skipped}"
        )
        if "val_loss" in record:
            self.print_line(f"{'':{len(step)}}  val loss {record['val_loss']:.4f}")  # beneath the loss

    def _slowest(self) -> str:
        """The rank whose median over the steps since the last line stands out, or nothing."""
        found = slowest(np.median(self.compute_s, axis=0)) if self.compute_s else {}
        self.compute_s = []
        if not found or found["slowest_excess"] < STANDS_OUT:
            return ""
        rank = found["slowest_rank"]
        return f"  slowest rank {rank} ({self.places[rank]['host']}) +{found['slowest_excess']:.0%}"
