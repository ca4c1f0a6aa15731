"""Part of make_docs.py: what a checkpoint costs."""

import json
import shutil
import statistics
from pathlib import Path

from docs_page import compare, log_of, machine, replace_block

CHECKPOINTED = "reduce-bcast,reduce-scatter,hierarchical-sharded"
EVERY, STEPS = 4, 18
STEP = f"--model gpt2-124M --batch-size 1 --seq-len 64 --eval-every 0 --steps {STEPS}"


def checkpoint(folder: Path, _) -> None:
    rows = ["| strategy | ranks | bytes a rank, MB | training stands still, s | written in the background, s |"]
    rows[0] += " a step, without and with, s |"
    rows += ["|---|---|---|---|---|---|"]
    for ranks in (1, 2):
        without, with_them = folder / f"without-{ranks}", folder / f"with-{ranks}"
        compare(without, ranks, CHECKPOINTED, STEP.split())
        compare(with_them, ranks, CHECKPOINTED, [*STEP.split(), "--checkpoint-every", str(EVERY), "--keep", "1"])
        for name in CHECKPOINTED.split(","):
            rows.append(_row(name, ranks, without / name, with_them / name))
        source = machine(with_them / name)
        shutil.rmtree(without)
    rows.append(
        f"\n`{STEP}`, `--checkpoint-every {EVERY}`; of the rank that took longest, medians over the checkpoints "
        f"written while training went on; a step is the mean of all after the first {EVERY}, the stand-still counted "
        f"in. {source}"
    )
    replace_block("docs/benchmarks.md", "checkpoint", "\n".join(rows))


def _row(name: str, ranks: int, without: Path, with_them: Path) -> str:
    by_rank = json.loads((with_them / "summary.json").read_text())["checkpoints"]
    during = [[cost for cost in costs if cost["step"] < STEPS] for costs in by_rank]
    largest = max(cost["bytes"] for costs in during for cost in costs)
    stopped, writing = (
        max(statistics.median(cost[key] for cost in costs) for costs in during) for key in ("stopped_s", "writing_s")
    )
    stops = sum(max(costs[at]["stopped_s"] for costs in during) for at in range(len(during[0])))
    plain, loaded = (statistics.fmean(line["step_s"] for line in log_of(run)[EVERY:]) for run in (without, with_them))
    loaded += stops / (STEPS - EVERY)
    return f"| `{name}` | {ranks} | {largest / 1e6:,.0f} | {stopped:.2f} | {writing:.1f} | {plain:.2f}, {loaded:.2f} |"
