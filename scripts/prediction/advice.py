"""The rows that advise.py prints, and which strategy to take."""

from dist.cost.model import Cluster, lower_bound_s
from dist.cost.overlap import Training
from scripts.prediction.predictor import PredictedStep, predicted_steps
from strategies import BASELINE, Strategy

ABOUT_EQUAL = 1.01


def advise(cluster: Cluster, training: Training, library: str, own: type[Strategy] | None = None) -> list[dict]:
    """A row of plain values for each strategy, the shortest step first; unknown ones, with None, last.

    Times are seconds; bytes_in and bytes_out are the largest over the nodes. own: as predicted_steps'.
    """
    bound_s = lower_bound_s(cluster, training.parameters * training.item_bytes)
    steps = predicted_steps(cluster, training, library, own)
    steps = sorted(steps, key=lambda step: float("inf") if step.best_s is None else step.best_s)
    return [as_row(step, bound_s) for step in steps]


def as_row(step: PredictedStep, bound_s: float) -> dict:
    result = dict.fromkeys(("exchange_s", "times_bound", "bytes_in", "bytes_out", "step_s", "step_overlapped_s"))
    memory = {"memory_bytes": step.memory.total, "memory_formula": step.memory.formula}
    result |= {"strategy": step.name, **memory, "unknown": step.unknown}
    if step.exchange is None:
        return result
    return result | {
        "exchange_s": step.exchange.seconds,
        "times_bound": step.exchange.seconds / bound_s if bound_s else None,
        "bytes_in": int(step.exchange.bytes_in.max()),
        "bytes_out": int(step.exchange.bytes_out.max()),
        "step_s": step.step_s,
        "step_overlapped_s": step.overlapped_s,
        "algorithms": step.exchange.algorithms,
    }


def best_step_s(row: dict) -> float:
    return row["step_s"] if row["step_overlapped_s"] is None else row["step_overlapped_s"]


def advice_sentence(rows: list[dict]) -> str:
    """The shortest step; of those within a percent, the one that needs the least memory."""
    known = [row for row in rows if row["step_s"] is not None]
    shortest = best_step_s(known[0])
    best = min(
        (row for row in known if best_step_s(row) <= ABOUT_EQUAL * shortest), key=lambda row: row["memory_bytes"]
    )
    if best["times_bound"] is None:
        return f"One node: nothing crosses a port, take {best['strategy']}."
    text = f"Take {best['strategy']}: its exchange is {best['times_bound']:.2f} times the lower bound, a step "
    text += f"{short_number(best_step_s(best), 1e3)} ms"
    if best["step_overlapped_s"] is not None:
        text += f" with overlap, {short_number(best['step_s'], 1e3)} without"
    baseline = next((row for row in known if row["strategy"] == BASELINE), None)
    ratio = best_step_s(baseline) / best_step_s(best) if baseline else 1.0
    return f"{text}, {ratio:.1f} times shorter than {BASELINE}'s." if ratio >= 1.05 else f"{text}."


def short_number(value: float | None, scale: float = 1.0) -> str:
    """Three digits, or a dash for None."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
