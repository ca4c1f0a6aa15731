"""The numbers behind advise.py: one row a strategy, and which one to take."""

from dist.cost_model import Cluster, exposed_s, lower_bound_s, predict
from dist.mpi_choices import UnknownChoice
from dist.rank_memory import rank_memory
from dist.schedules import SCHEDULES, WIRE_BYTES

DEDICATED = "reduce-bcast/dedicated"
# Of a step's computing, backward is two thirds: two products for each of forward's.
BACKWARD = 2 / 3
# What may run beside computing: (part of the exchange, part of the computing). The rest comes after the update or, with
# MPI's blocking calls, after backward.
OVERLAP = {
    "ring": (1.0, BACKWARD),
    "tree": (1.0, BACKWARD),
    "hierarchical": (1.0, BACKWARD),
    "hierarchical-sharded": (0.5, BACKWARD),
    "zero-2": (0.5, BACKWARD),
    "zero-3": (1.0, 1.0),
}
# The bucket that becomes final last: 4 MiB, or an eighth of a small vector.
BUCKET_BYTES, LARGEST_BUCKET = 4 << 20, 1 / 8
ABOUT_EQUAL = 1.01


def advise(cluster: Cluster, parameters: int, compute_s: float, library: str, wire: str) -> list[dict]:
    """A row of plain values for each strategy, the shortest step first; unknown ones, with None, last.

    Times are seconds; bytes_in and bytes_out are the largest over the nodes.
    """
    names = [*SCHEDULES, *([DEDICATED] if len(cluster.placement) > 1 else [])]
    rows = [row(name, cluster, parameters, compute_s, library, wire) for name in names]
    return sorted(rows, key=lambda row: float("inf") if row["step_s"] is None else best_step_s(row))


def row(name: str, cluster: Cluster, parameters: int, compute_s: float, library: str, wire: str) -> dict:
    strategy, ranks = name.split("/")[0], len(cluster.placement)
    memory = rank_memory(strategy, parameters, ranks, cluster.nodes)
    result = dict.fromkeys(("exchange_s", "times_bound", "bytes_in", "bytes_out", "step_s", "step_overlapped_s"))
    result |= {"strategy": name, "memory_bytes": memory.total, "memory_formula": memory.formula, "unknown": None}
    size = parameters * WIRE_BYTES[wire]
    try:
        prediction = predict(strategy, cluster, size, library, wire)
    except UnknownChoice as unknown:
        return result | {"unknown": str(unknown)}
    seconds, bound = prediction.seconds, lower_bound_s(cluster, size)
    busy_s = compute_s * (ranks / (ranks - 1) if name == DEDICATED else 1)
    return result | {
        "exchange_s": seconds,
        "times_bound": seconds / bound if bound else None,
        "bytes_in": int(prediction.bytes_in.max()),
        "bytes_out": int(prediction.bytes_out.max()),
        "step_s": busy_s + seconds,
        "step_overlapped_s": overlapped_step_s(strategy, seconds, busy_s, min(LARGEST_BUCKET, BUCKET_BYTES / size)),
        "algorithms": prediction.algorithms,
    }


def overlapped_step_s(strategy: str, exchange_s: float, compute_s: float, last_bucket: float) -> float | None:
    """None where nothing of the exchange can run beside computing. last_bucket: its part of the vector."""
    if strategy not in OVERLAP:
        return None
    part, beside = OVERLAP[strategy]
    early_s = part * exchange_s
    return compute_s + exchange_s - early_s + exposed_s(early_s, beside * compute_s, last_bucket * early_s)


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
    text += f"{number_of_ms(best_step_s(best))} ms"
    if best["step_overlapped_s"] is not None:
        text += f" with overlap, {number_of_ms(best['step_s'])} without"
    server = next((row for row in known if row["strategy"] == "reduce-bcast"), None)
    ratio = best_step_s(server) / best_step_s(best) if server else 1.0
    return f"{text}, {ratio:.1f} times shorter than reduce-bcast's." if ratio >= 1.05 else f"{text}."


def number_of_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
