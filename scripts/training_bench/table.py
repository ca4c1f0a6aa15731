"""The figures of each contender from its steps, and the table that bench_training.py prints."""

import statistics

from scripts.exchange_bench.table import aligned, lower_bound_s
from traces.units import count_text, short_count

HEADERS = 1.045  # an Ethernet frame of 1514 bytes carries 1448 of TCP's data
OURS, DDP = "ours", "DDP"  # what the others are compared with
ALONE = "no exchange"  # how the contenders' names end that compute alone


def summarize(turns: dict[str, list[list[tuple[float, float]]]], size_bytes: int, nodes: int, rate) -> dict:
    """{"contenders": by name the figures, "least_s": the least step that the rate allows}.

    turns: by contender, for each turn (seconds, loss) of its steps, of which the first is warm-up. A contender's
    computing is the step of the same library without exchange; what its step is longer is the exchange that shows.
    """
    alone = {name.split(",")[0]: median_s(steps) for name, steps in turns.items() if name.endswith(ALONE)}
    reference = losses_of(turns[OURS]) if OURS in turns else None
    found = {}
    for name, steps in turns.items():
        step_s, losses = median_s(steps), losses_of(steps)
        compute_s = min(step_s, alone["ours" if name.startswith(OURS) else "PyTorch"])
        every = [seconds for turn in steps for seconds, _ in turn[1:]]
        found[name] = {
            "step_s": step_s, "compute_s": compute_s, "exposed_s": step_s - compute_s, "min_s": min(every),
            "max_s": max(every), "turns_s": [median_s([turn]) for turn in steps], "losses": losses,
        }  # fmt: skip
        if reference and not name.endswith(ALONE):
            pairs = zip(losses, reference, strict=True)
            found[name]["loss_differs"] = max(abs(loss / other - 1) for loss, other in pairs)
        if DDP in turns:
            found[name]["times_as_fast"] = median_s(turns[DDP]) / step_s
    exchange_s = HEADERS * (lower_bound_s(size_bytes, nodes, rate) or 0.0)
    return {"contenders": found, "exchange_bound_s": exchange_s, "least_s": max(exchange_s, min(alone.values()))}


def median_s(turns: list[list[tuple[float, float]]]) -> float:
    return statistics.median(seconds for turn in turns for seconds, _ in turn[1:])


def losses_of(turns: list[list[tuple[float, float]]]) -> list[float]:
    """Of the first turn: each begins with the same parameters and takes the same windows."""
    return [loss for _, loss in turns[0]]


def table(report: dict) -> str:
    """Head line, one line a contender, the least that there can be, and why some are missing."""
    contenders = report["contenders"]
    rows = [["", "step, s", "compute, s", "exchange exposed, s", "times as fast as DDP", "last loss", "losses differ"]]
    for name, one in contenders.items():
        times = f"{one['times_as_fast']:.2f}" if "times_as_fast" in one else "-"
        differs = f"{one['loss_differs']:.1e}" if "loss_differs" in one else "-"
        seconds = [f"{one[key]:.3f}" for key in ("step_s", "compute_s", "exposed_s")]
        rows.append([name, *seconds, times, f"{one['losses'][-1]:.4f}", differs])
    missing = [f"{name}: left out: {why}" for name, why in report["left_out"].items()]
    least = f"least step, the longer of computing and exchange: {report['least_s']:.3f} s"
    return "\n".join([head(report), "", aligned(rows), "", least, *missing])


def head(report: dict) -> str:
    """What was trained where."""
    place = f"{count_text(report['ranks'], 'rank')} on {count_text(report['nodes'], 'node')}"
    rate = report["link"]["bytes_per_s"]
    links = (
        f", links of {rate * 8 / 1e6:,.0f} Mbit/s{'' if report['link']['nominal'] else ' as probed'}" if rate else ""
    )
    took = f"median of {count_text(report['turns'], 'turn')} of {report['steps'] - 1} steps, after one of warm-up"
    return f"{short_count(report['parameters'])} parameters, {report['tokens']:,} tokens a step, {place}{links}; {took}"
