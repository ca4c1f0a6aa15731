"""bench_step.py on CPUs: the contenders take turns, step by step; the floor is the step's matrix products alone."""

import statistics
import time
from contextlib import ExitStack, closing

from scripts.machine.host import machine, versions
from scripts.step_bench.process import (
    TORCH_CONTENDERS,
    Contender,
    chosen,
    contender_command,
    statistics_of,
    write_report,
)  # fmt: skip

SETTLE_S = 0.5  # the threads of BLAS and OpenMP spin on after a step, on the cores of whoever comes next
COMMAND = contender_command()
SHAPE = ("model", "batch_size", "seq_len", "threads")
CONTENDERS = {"ours": "this project", "floor": "matrix products alone"}


def bench(settings, config) -> int:
    """Measure, print, write; the exit code."""
    names = CONTENDERS | (TORCH_CONTENDERS if settings.vs == "torch" else {})
    report = summarize(settings, measure(settings, names))
    print(table(report, names))
    write_report(settings, report)
    return 0


def measure(settings, names) -> dict[str, list[dict]]:
    """Every contender's reports of its counted steps, after two that are not counted."""
    results = {name: [] for name in names}
    with ExitStack() as stack:
        contenders = {
            name: stack.enter_context(closing(Contender(COMMAND, name, chosen(settings, *SHAPE)))) for name in names
        }
        for contender in contenders.values():
            for _ in range(2):
                contender.ask("step")
        for _ in range(settings.repeat):
            for name, contender in contenders.items():
                time.sleep(SETTLE_S)
                results[name].append(contender.ask("step"))
    return results


def summarize(settings, results) -> dict:
    """What --json gets: statistics of each contender, the median of each part of its step, its memory."""
    ours, contenders = [step["step_s"] for step in results["ours"]], {}
    for name, steps in results.items():
        seconds = [step["step_s"] for step in steps]
        contenders[name] = statistics_of(seconds, ours, settings.batch_size * settings.seq_len) | {
            "peak_memory_bytes": steps[-1]["peak_memory_bytes"],
            "parts_s": {part: statistics.median(step["parts"][part] for step in steps) for part in steps[0]["parts"]},
            "versions": steps[-1]["versions"],
        }
    facts = {"settings": chosen(settings, *SHAPE, "repeat"), "machine": machine() | versions("numpy", "numba")}
    return facts | {"contenders": contenders}


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
