"""Parts of make_docs.py: what a rank holds, measured."""

import json
from pathlib import Path

from gpt2.config import PRESETS
from gpt2.parameters import Layout
from scripts.makers.pages.page import compare, machine, replace_block
from scripts.makers.pages.training import STRATEGIES

MEMORY_STEP = "--model gpt2-124M --batch-size 4 --seq-len 256 --steps 3 --eval-every 0"
SHARDED = "reduce-scatter,hierarchical-sharded,zero-2,zero-3"
SHARDING_RUNS = (("gpt2-124M", 1), ("gpt2-124M", 2), ("gpt2-124M", 4), ("gpt2-350M", 2), ("gpt2-350M", 4))
SHARDING_STEP = "--batch-size 1 --seq-len 64 --steps 2 --eval-every 0"


def memory(folder: Path, _) -> None:
    compare(folder, 2, STRATEGIES, MEMORY_STEP.split())
    rows = ["| strategy | rank 0, GB | rank 1, GB | one step, s |", "|---|---|---|---|"]
    for name in STRATEGIES.split(","):
        run = folder / name.replace("/", "-")
        peak = json.loads((run / "summary.json").read_text())["peak_memory_bytes"]
        last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
        rows.append(f"| `{name}` | {peak[0] / 1e9:.2f} | {peak[1] / 1e9:.2f} | {last['step_s']:.1f} |")
    rows.append(f"\n`{MEMORY_STEP}` on 2 ranks; peak resident memory. {machine(run)}")
    replace_block("README.md", "memory", "\n".join(rows))


def sharding(folder: Path, _) -> None:
    rows = ["| model | ranks | strategy | ZeRO's formula, GB | with its buffers, GB | measured, GB |"]
    rows += ["|---|---|---|---|---|---|"]
    for model, count in SHARDING_RUNS:
        out = folder / f"{model}-{count}"
        compare(out, count, SHARDED, ["--model", model, *SHARDING_STEP.split()])
        layout = Layout(PRESETS[model])
        for name in SHARDED.split(","):
            formula, buffers = (4e-9 * elements for elements in held(name, layout, count))
            peak = max(json.loads((out / name / "summary.json").read_text())["peak_memory_bytes"]) / 1e9
            rows.append(f"| {model} | {count} | `{name}` | {formula:.2f} | {formula + buffers:.2f} | {peak:.2f} |")
    rows.append(f"\n`{SHARDING_STEP}`; peak resident memory of the largest rank. {machine(out / name)}")
    replace_block("docs/benchmarks.md", "sharding", "\n".join(rows))


def held(strategy: str, layout: Layout, ranks: int) -> tuple[float, float]:
    """float32 values a rank of one node holds: parameters, gradients and moments, and what it works in besides."""
    embeddings, layer, *_, last = (stop - start for start, stop in layout.ranges)
    whole, part, room = layout.size, layout.size / ranks, embeddings + 2 * layer + last
    return {
        "reduce-scatter": (2 * whole + 2 * part, part),  # the sum of its block
        "hierarchical-sharded": (2 * whole + 2 * part, whole - part),  # what it adds of its neighbours' gradients
        "zero-2": (whole + 3 * part, room),
        "zero-3": (4 * part, 2 * room),
    }[strategy]
