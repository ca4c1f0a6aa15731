"""bench_step.py on CPUs: contenders take turns, step by step; the floor runs only the step's matrix products.

The multiply-add instruction's peak takes turns like a contender (peak.py).
"""

import statistics
import time
from contextlib import ExitStack, closing

from gpt2.config import PRESETS
from scripts.bench.report import ReportFile
from scripts.bench.turns import in_turns
from scripts.machine.blas import blas_text
from scripts.machine.host import machine, versions
from scripts.step_bench.process import TORCH_CONTENDERS, ContenderProcess, compare_steps, contender_command, selected
from scripts.step_bench.products import least_flops

SETTLE_S = 0.5  # after a step the threads of BLAS and OpenMP still spin, on cores that the next contender needs
COMMAND = contender_command()
SHAPE = ("model", "batch_size", "seq_len", "threads", "dtype")
CONTENDERS = {"ours": "this project", "floor": "matrix products alone"}
FLOAT32 = {"ours-float32": "this project, float32"}  # an extra contender when --dtype is bfloat16
PEAK = "peak"  # a contender that runs nothing but the multiply-add instruction of our products
HEAD = f"{'':24}   step, s     min     max  tokens/s ours / it peak / it  memory, GB"


def bench(settings, config) -> int:
    """Measure, print the table and write the report. Return the exit code."""
    names = CONTENDERS | (FLOAT32 if settings.dtype == "bfloat16" else {})
    names |= TORCH_CONTENDERS if "torch" in settings.vs else {}
    report = summarize(settings, measure(settings, [*names, PEAK]))
    print(table(report, names))
    ReportFile(settings.json).write(report)
    return 0


def measure(settings, names: list[str]) -> dict[str, list[dict]]:
    """Measure in turn, after two uncounted steps. Return each contender's answers for the counted steps."""
    results = {name: [] for name in names}
    shape = selected(settings, *SHAPE)
    with ExitStack() as stack:
        contenders = {}
        for name in names:
            contenders[name] = stack.enter_context(closing(ContenderProcess(COMMAND, name, shape)))
            for _ in range(2):
                contenders[name].ask("step")
        for _, name, contender in in_turns(contenders, settings.repeat):
            time.sleep(SETTLE_S)
            results[name].append(contender.ask("step"))
    return results


def summarize(settings, results) -> dict:
    """Return the report: each contender's step times, median times of parts, and memory; the peak's best turn."""
    peak = min(results[PEAK], key=lambda turn: turn["step_s"])
    (instruction,) = peak["parts"]
    ours = results["ours"]
    ours_s = [step["step_s"] for step in ours]
    contenders = {}
    for name, steps in results.items():
        if name == PEAK:
            continue
        seconds = [step["step_s"] for step in steps]
        times = compare_steps(seconds, ours_s, settings.batch_size * settings.seq_len)
        contenders[name] = times | {
            "peak_over_this": peak["step_s"] / times["step_s"],
            "peak_memory_bytes": steps[-1]["peak_memory_bytes"],
            "parts_s": {part: statistics.median(step["parts"][part] for step in steps) for part in steps[0]["parts"]},
            **{name: steps[-1][name] for name in ("versions", "environment", "blas")},
        }
    flops = least_flops(PRESETS[settings.model], settings.batch_size, settings.seq_len)
    return {
        "settings": selected(settings, *SHAPE, "repeat"),
        "machine": machine() | versions("numpy", "numba"),
        "peak": {"instruction": instruction, "step_s": peak["step_s"], "flops_per_s": flops / peak["step_s"]},
        "blas": ours[-1]["blas"],
        "contenders": contenders,
    }


def table(report: dict, names: dict[str, str]) -> str:
    """Return the table. names: the contenders and their labels."""
    s = report["settings"]
    contenders = report["contenders"]
    lines = [
        f"{s['model']}, B={s['batch_size']} T={s['seq_len']}, {s['dtype']}, {s['threads']} threads, "
        f"{s['repeat']} steps in turn",
        blas_text(report["blas"]),
        "",
        HEAD,
    ]
    lines += [row(label, contenders[name]) for name, label in names.items()]
    lines += ["", peak_line(report, names)]
    for name in CONTENDERS:
        c = contenders[name]
        lines += ["", f"{names[name]}, where the step goes:"]
        lines += [
            f"    {part:28} {seconds * 1e3:9.1f} ms {seconds / c['step_s']:6.1%}"
            for part, seconds in c["parts_s"].items()
        ]
    return "\n".join(lines)


def row(label: str, c: dict) -> str:
    """Return the line of a contender below HEAD."""
    times = f"{c['step_s']:9.3f} {c['min_s']:7.3f} {c['max_s']:7.3f} {c['tokens_per_s']:9.1f}"
    ratios = f"{c['ours_over_this']:9.3f} {c['peak_over_this']:9.3f}"
    return f"{label:24} {times} {ratios} {c['peak_memory_bytes'] / 1e9:11.2f}"


def peak_line(report: dict, names: dict[str, str]) -> str:
    """Describe the peak, and how much faster a step at the peak would be than each contender's."""
    peak = report["peak"]
    others = [name for name in names if name not in CONTENDERS]
    ratios = {name: 1 / report["contenders"][name]["peak_over_this"] for name in others}
    most = [f"{ratio:.2f} x as fast as {names[name]}" for name, ratio in ratios.items()]
    return (
        f"{peak['instruction']} at its peak, {peak['flops_per_s'] / 1e9:.0f} GFLOP/s: the products that a step needs "
        f"in {peak['step_s']:.3f} s" + (f"\n    at most {', '.join(most)}" if most else "")
    )
