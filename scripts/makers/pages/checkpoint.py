"""Part of make_docs.py: what a checkpoint costs."""

import json
import shutil
import statistics
from pathlib import Path

from scripts.makers.pages.page import compare, log_of, machine, replace_block

CASES = ((1, "hierarchical-sharded"), (2, "reduce-bcast"), (2, "hierarchical-sharded"))
EVERY, STEPS = 10, 31
STEP = f"--model gpt2-124M --batch-size 1 --seq-len 64 --eval-every 0 --steps {STEPS}"
HEADER = (
    "| strategy | ranks | bytes a rank, MB | training stands still, s | written in the background, s "
    "| a step, s | a checkpoint adds in all, s |\n|---|---|---|---|---|---|---|"
)


def checkpoint(folder: Path, _) -> None:
    rows = [HEADER]
    for ranks, name in CASES:
        without, with_them = folder / f"{ranks}-{name}-without", folder / f"{ranks}-{name}-with"
        compare(without, ranks, name, STEP.split())
        compare(with_them, ranks, name, [*STEP.split(), "--checkpoint-every", str(EVERY), "--keep", "1"])
        rows.append(_row(name, ranks, without / name, with_them / name))
        source = machine(with_them / name)
        shutil.rmtree(with_them / name / "checkpoints")
        shutil.rmtree(without)
    rows.append(
        f"\n`{STEP}`, `--checkpoint-every {EVERY}`; of the rank that took longest, medians over the checkpoints "
        f"written while training went on. What one adds in all: stand-still, and the time by which the steps are "
        f"slower than in a run without, {EVERY} steps to a checkpoint. {source}"
    )
    replace_block("docs/benchmarks.md", "checkpoint", "\n".join(rows))


def _row(name: str, ranks: int, without: Path, with_them: Path) -> str:
    by_rank = json.loads((with_them / "summary.json").read_text())["checkpoints"]
    during = [[cost for cost in costs if cost["step"] < STEPS] for costs in by_rank]
    largest = max(cost["bytes"] for costs in during for cost in costs)
    stopped, writing = (
        max(statistics.median(cost[key] for cost in costs) for costs in during) for key in ("stopped_s", "writing_s")
    )
    plain, loaded = (statistics.fmean(line["step_s"] for line in log_of(run)[EVERY:]) for run in (without, with_them))
    adds = stopped + EVERY * (loaded - plain)
    return f"| `{name}` | {ranks} | {largest / 1e6:,.0f} | {stopped:.2f} | {writing:.1f} | {plain:.2f} | {adds:.1f} |"
