"""Summarize each contender's steps, and format the table that bench_training.py prints."""

import statistics

from scripts.bench.turns import step_times
from scripts.exchange_bench.exchange_table import lower_bound_s
from traces.units import count_text, short_count
from traces.verdict.summary import aligned

HEADERS = 1.045  # an Ethernet frame of 1514 bytes carries 1448 bytes of TCP payload
OURS = "ours"  # its losses are the reference
DDP = "DDP"  # its steps are the reference
ALONE = "no exchange"  # ends the names of contenders that only compute


def summarize(turns: dict[str, list[list[tuple[float, float]]]], size_bytes: int, nodes: int, rate) -> dict:
    """Return {"contenders": figures by name, "exchange_bound_s", "least_s": the least step that the rate allows}.

    turns: (seconds, loss) of each step, by contender and turn; a turn's first step is warm-up. A contender's compute
    time is the step of the same library without exchange; the rest of its step is the exposed exchange.
    """
    alone = {name.split(",")[0]: median_s(steps) for name, steps in turns.items() if name.endswith(ALONE)}
    reference = losses_of(turns[OURS]) if OURS in turns else None
    found = {}
    for name, steps in turns.items():
        times = step_times(counted_s(steps))
        step_s = times["step_s"]
        compute_s = min(step_s, alone[library_of(name)])
        losses = losses_of(steps)
        found[name] = times | {
            "compute_s": compute_s,
            "exposed_s": step_s - compute_s,
            "turns_s": [median_s([turn]) for turn in steps],
            "losses": losses,
        }
        if reference and not name.endswith(ALONE):
            pairs = zip(losses, reference, strict=True)
            found[name]["loss_differs"] = max(abs(loss / other - 1) for loss, other in pairs)
        if DDP in turns:
            found[name]["times_as_fast"] = median_s(turns[DDP]) / step_s
    exchange_s = HEADERS * (lower_bound_s(size_bytes, nodes, rate) or 0.0)
    return {"contenders": found, "exchange_bound_s": exchange_s, "least_s": max(exchange_s, min(alone.values()))}


def library_of(name: str) -> str:
    """Return "PyTorch" for a contender of PyTorch's, otherwise "ours"; any strategy may be a contender."""
    return "PyTorch" if name.startswith(("PyTorch", "DDP", "FSDP")) else OURS


def counted_s(turns: list[list[tuple[float, float]]]) -> list[float]:
    """Return the seconds of all steps except each turn's warm-up step."""
    return [seconds for turn in turns for seconds, _ in turn[1:]]


def median_s(turns: list[list[tuple[float, float]]]) -> float:
    return statistics.median(counted_s(turns))


def losses_of(turns: list[list[tuple[float, float]]]) -> list[float]:
    """Return the losses of the first turn; every turn starts with the same parameters and reads the same windows."""
    return [loss for _, loss in turns[0]]


def table(report: dict) -> str:
    """Return a header, a line per contender, the shortest possible step, and the reason for each missing contender."""
    contenders = report["contenders"]
    rows = [["", "step, s", "compute, s", "exchange exposed, s", "times as fast as DDP", "last loss", "losses differ"]]
    for name, one in contenders.items():
        times = f"{one['times_as_fast']:.2f}" if "times_as_fast" in one else "-"
        differs = f"{one['loss_differs']:.1e}" if "loss_differs" in one else "-"
        seconds = [f"{one[key]:.3f}" for key in ("step_s", "compute_s", "exposed_s")]
        rows.append([name, *seconds, times, f"{one['losses'][-1]:.4f}", differs])
    missing = [f"{name}: skipped: {why}" for name, why in report["left_out"].items()]
    least = f"lower bound of a step, the longer of computing and exchange: {report['least_s']:.3f} s"
    return "\n".join([head(report), "", aligned(rows), "", least, *missing])


def head(report: dict) -> str:
    """Describe the model, the ranks and the links."""
    place = f"{count_text(report['ranks'], 'rank')} on {count_text(report['nodes'], 'node')}"
    rate = report["link"]["bytes_per_s"]
    probed = "" if report["link"]["nominal"] else " as probed"
    links = f", links of {rate * 8 / 1e6:,.0f} Mbit/s{probed}" if rate else ""
    steps = count_text(report["steps"] - 1, "step")
    took = f"median of {count_text(report['turns'], 'turn')} of {steps}, after one warm-up step"
    return f"{short_count(report['parameters'])} parameters, {report['tokens']:,} tokens a step, {place}{links}; {took}"
