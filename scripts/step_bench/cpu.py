"""bench_step.py on CPUs: the contenders take turns, step by step; the floor is the step's matrix products alone.

The same turns measure the peak of the instruction that makes our products (peak.py).
"""

import statistics
import time
from contextlib import ExitStack, closing

from gpt2.config import PRESETS
from scripts.machine.blas import blas_text
from scripts.machine.host import machine, versions
from scripts.step_bench.process import (
    TORCH_CONTENDERS,
    Contender,
    chosen,
    contender_command,
    statistics_of,
    write_report,
)  # fmt: skip
from scripts.step_bench.products import least_flops

SETTLE_S = 0.5  # the threads of BLAS and OpenMP spin on after a step, on the cores of whoever comes next
COMMAND = contender_command()
SHAPE = ("model", "batch_size", "seq_len", "threads", "dtype")
CONTENDERS = {"ours": "this project", "floor": "matrix products alone"}
FLOAT32 = {"ours-float32": "this project, float32"}  # where the others compute in bfloat16
PEAK = "peak"  # what the instructions can do at all


def bench(settings, config) -> int:
    """Measure, print, write; the exit code."""
    names = CONTENDERS | (FLOAT32 if settings.dtype == "bfloat16" else {})
    names |= (TORCH_CONTENDERS if "torch" in settings.vs else {}) | {PEAK: "at its peak"}
    report = summarize(settings, measure(settings, names))
    print(table(report, {name: text for name, text in names.items() if name != PEAK}))
    write_report(settings, report)
    return 0


def measure(settings, names) -> dict[str, list[dict]]:
    """Return every contender's reports of its counted steps, after two that are not counted."""
    results = {name: [] for name in names}
    shape = chosen(settings, *SHAPE)
    with ExitStack() as stack:
        contenders = {}
        for name in names:
            contenders[name] = stack.enter_context(closing(Contender(COMMAND, name, shape)))
            for _ in range(2):
                contenders[name].ask("step")
        for _ in range(settings.repeat):
            for name, contender in contenders.items():
                time.sleep(SETTLE_S)
                results[name].append(contender.ask("step"))
    return results


def summarize(settings, results) -> dict:
    """What --json gets: statistics of each contender, the median of each part of its step, its memory; and the peak,
    which counts as its best turn had it."""
    ours, contenders = [step["step_s"] for step in results["ours"]], {}
    peak = min(results.pop(PEAK), key=lambda turn: turn["step_s"])
    (instruction,) = peak["parts"]
    for name, steps in results.items():
        seconds = [step["step_s"] for step in steps]
        contenders[name] = statistics_of(seconds, ours, settings.batch_size * settings.seq_len) | {
            "peak_over_this": peak["step_s"] / statistics.median(seconds),
            "peak_memory_bytes": steps[-1]["peak_memory_bytes"],
            "parts_s": {part: statistics.median(step["parts"][part] for step in steps) for part in steps[0]["parts"]},
            **{name: steps[-1][name] for name in ("versions", "environment", "blas")},
        }
    facts = {"settings": chosen(settings, *SHAPE, "repeat"), "machine": machine() | versions("numpy", "numba")}
    blas = results["ours"][-1]["blas"]
    flops = least_flops(PRESETS[settings.model], settings.batch_size, settings.seq_len)
    facts |= {"peak": {"instruction": instruction, "step_s": peak["step_s"], "flops_per_s": flops / peak["step_s"]}}
    return facts | {"blas": blas, "contenders": contenders}


def table(report: dict, names: dict[str, str]) -> str:
    s = report["settings"]
    lines = [
        f"{s['model']}, B={s['batch_size']} T={s['seq_len']}, {s['dtype']}, {s['threads']} threads, "
        f"{s['repeat']} steps in turn",
        blas_text(report["blas"]),
        "",
        f"{'':24} {'step, s':>9} {'min':>7} {'max':>7} {'tokens/s':>9} {'ours / it':>9} {'peak / it':>9} "
        f"{'memory, GB':>11}",
    ]
    for name, text in names.items():
        c = report["contenders"][name]
        lines.append(
            f"{text:24} {c['step_s']:9.3f} {c['min_s']:7.3f} {c['max_s']:7.3f} {c['tokens_per_s']:9.1f} "
            f"{c['ours_over_this']:9.3f} {c['peak_over_this']:9.3f} {c['peak_memory_bytes'] / 1e9:11.2f}"
        )
    lines += ["", peak_line(report, names)]
    for name in CONTENDERS:
        c = report["contenders"][name]
        lines += ["", f"{names[name].strip()}, where the step goes:"]
        lines += [
            f"    {part:28} {seconds * 1e3:9.1f} ms {seconds / c['step_s']:6.1%}"
            for part, seconds in c["parts_s"].items()
        ]
    return "\n".join(lines)


def peak_line(report: dict, names: dict[str, str]) -> str:
    """The peak, and how much faster than each of the others a step at it would be: no step of ours can be more."""
    peak, contenders = report["peak"], report["contenders"]
    others = [name for name in names if name not in CONTENDERS]
    most = [f"{1 / contenders[name]['peak_over_this']:.2f} x as fast as {names[name]}" for name in others]
    return (
        f"{peak['instruction']} at its peak, {peak['flops_per_s'] / 1e9:.0f} GFLOP/s: the products that a step needs "
        f"in {peak['step_s']:.3f} s" + (f"\n    at most {', '.join(most)}" if most else "")
    )
