"""Parts of make_docs.py: strategies compared on this machine's cores, how the loss falls, ranks that share a node."""

import json
import shutil
import statistics
from pathlib import Path

from scripts.makers.pages.page import FIGURES, compare, comparison_table, log_of, machine, replace_block

STRATEGIES = "reduce-bcast,reduce-bcast/dedicated,sliced,reduce-scatter,allreduce"
RANKS_STEP = "--model gpt2-124M --seq-len 64 --steps 7 --eval-every 0"


def comparison(folder: Path, _) -> None:
    output = compare(folder, 4, STRATEGIES)
    shutil.copy(folder / "plots" / "comparison.png", FIGURES / "comparison.png")
    replace_block("README.md", "comparison", f"```\n{comparison_table(output)}\n```\n\n{machine(folder / 'sliced')}")


def learning(folder: Path, text: Path) -> None:
    """The preset whole, on two ranks."""
    flags = ["--preset", "nanogpt-shakespeare", "--text"]
    compare(folder, 2, "reduce-scatter", [*flags, str(text)])
    run = folder / "reduce-scatter"
    shutil.copy(folder / "plots" / "loss.png", FIGURES / "learning.png")
    last = log_of(run)
    train_loss = sum(line["loss"] for line in last[-200:]) / 200
    command = f"mpirun -n 2 python scripts/train.py {' '.join(flags)} tinyshakespeare.txt"
    replace_block(
        "README.md",
        "learning",
        f"```\n{command}\n```\n\nValidation loss {last[-1]['val_loss']:.3f} over the whole validation set (nanoGPT's "
        f"README says 1.88, of 20 batches), training loss {train_loss:.3f} over the last 200 steps, in "
        f"{sum(line['step_s'] for line in last) / 60:.1f} minutes. {machine(run)}",
    )


def ranks(folder: Path, _) -> None:
    rows = ["| ranks | sequences a rank | threads a rank | tokens/s |", "|---|---|---|---|"]
    for count, threads in ((1, 0), (2, 0), (4, 0), (4, 2)):
        flags = [*RANKS_STEP.split(), "--batch-size", str(4 // count), "--threads", str(threads)]
        run = folder / f"{count}-{threads}"
        compare(run, count, "reduce-scatter", flags)
        config = json.loads((run / "reduce-scatter" / "config.json").read_text())
        speed = statistics.median(line["tokens_per_s"] for line in log_of(run / "reduce-scatter")[2:])
        chosen = "" if threads == 0 else " (forced by `--threads`)"
        rows.append(f"| {count} | {4 // count} | {config['threads_per_rank']}{chosen} | {speed:.0f} |")
    rows.append(f"\n`--strategy reduce-scatter {RANKS_STEP}`, median of 5 steps. {machine(run / 'reduce-scatter')}")
    replace_block("docs/benchmarks.md", "ranks", "\n".join(rows))
