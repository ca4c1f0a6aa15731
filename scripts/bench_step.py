"""One training step on one rank: how close to its matrix products alone, and how it compares with PyTorch.

    python scripts/bench_step.py --model gpt2-124M --batch-size 4 --seq-len 256
    python scripts/bench_step.py --model gpt2-124M --batch-size 4 --seq-len 256 --vs torch --json step.json

Every contender is a process of its own (so that peak memory is its own too) and they take turns, step by step, so that
a drift of the machine meets all of them. The floor is the time of all matrix products of the step: same shapes, BLAS
and threads, attention's included and its masked half not skipped. --vs torch adds PyTorch eager and compiled; torch is
not a dependency of the project.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from machine import machine, versions
from step_contenders import Contender, ContenderError

from gpt2.config import PRESETS

SETTLE_S = 0.5  # the threads of BLAS and OpenMP spin on after a step, on the cores of whoever comes next

CONTENDERS = {"ours": "this project", "floor": "matrix products alone"}
TORCH_CONTENDERS = {"torch": "PyTorch, eager", "torch-compiled": "PyTorch, torch.compile"}


def main():
    settings = parse()
    names = CONTENDERS | (TORCH_CONTENDERS if settings.vs == "torch" else {})
    try:
        results = measure(settings, names)
    except ContenderError as error:
        print(f"bench_step.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    report = summarize(settings, results)
    print(table(report, names))
    if settings.json:
        settings.json.write_text(json.dumps(report, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="gpt2-124M", help="shape by name (gpt2-124M)")
    parser.add_argument("--batch-size", type=int, default=4, help="B: sequences (4)")
    parser.add_argument("--seq-len", type=int, default=256, help="T: tokens of a sequence (256)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each contender (all cores)"
    )
    parser.add_argument(
        "--repeat", type=int, default=7, help="counted steps of each contender (7), after two not counted"
    )
    parser.add_argument("--vs", choices=("torch",), help="also measure PyTorch, eager and compiled")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    return parser.parse_args()


def measure(settings, names) -> dict[str, list[dict]]:
    """Every contender's reports of its counted steps."""
    shape = {"model": settings.model, "batch_size": settings.batch_size, "seq_len": settings.seq_len}
    contenders = {name: Contender(name, shape | {"threads": settings.threads}) for name in names}
    try:
        for contender in contenders.values():
            for _ in range(2):
                contender.step()
        results = {name: [] for name in names}
        for _ in range(settings.repeat):
            for name, contender in contenders.items():
                time.sleep(SETTLE_S)
                results[name].append(contender.step())
    finally:
        for contender in contenders.values():
            contender.close()
    return results


def summarize(settings, results) -> dict:
    """Medians and spread of each contender; ratios are medians of the ratios step by step."""
    tokens = settings.batch_size * settings.seq_len
    ours = [step["step_s"] for step in results["ours"]]
    contenders = {}
    for name, steps in results.items():
        seconds = [step["step_s"] for step in steps]
        contenders[name] = {
            "step_s": statistics.median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "tokens_per_s": tokens / statistics.median(seconds),
            "peak_memory_bytes": steps[-1]["peak_memory_bytes"],
            "ours_over_this": statistics.median(a / b for a, b in zip(ours, seconds, strict=True)),
            "parts_s": {part: statistics.median(step["parts"][part] for step in steps) for part in steps[0]["parts"]},
            "versions": steps[-1]["versions"],
        }
    shape = {name: getattr(settings, name) for name in ("model", "batch_size", "seq_len", "threads", "repeat")}
    return {"settings": shape, "machine": machine() | versions("numpy", "numba"), "contenders": contenders}


def table(report: dict, names: dict[str, str]) -> str:
    s = report["settings"]
    lines = [
        f"{s['model']}, B={s['batch_size']} T={s['seq_len']}, {s['threads']} threads, {s['repeat']} steps in turn",
        "",
        f"{'':24} {'step, s':>9} {'min':>7} {'max':>7} {'tokens/s':>9} {'ours / it':>9} {'memory, GB':>11}",
    ]
    for name, text in names.items():
        c = report["contenders"][name]
        lines.append(
            f"{text:24} {c['step_s']:9.3f} {c['min_s']:7.3f} {c['max_s']:7.3f} {c['tokens_per_s']:9.1f} "
            f"{c['ours_over_this']:9.3f} {c['peak_memory_bytes'] / 1e9:11.2f}"
        )
    for name in CONTENDERS:
        c = report["contenders"][name]
        lines += ["", f"{names[name]}, where the step goes:"]
        lines += [
            f"    {part:28} {seconds * 1e3:9.1f} ms {seconds / c['step_s']:6.1%}"
            for part, seconds in c["parts_s"].items()
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
