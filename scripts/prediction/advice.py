"""The numbers behind advise.py: one row a strategy, and which one to take."""

from dataclasses import dataclass

from dist.cost.model import Cluster, exposed_s, lower_bound_s, predict
from dist.cost.mpi_choices import UnknownChoice
from dist.cost.rank_memory import VECTOR_BYTES, rank_memory
from dist.cost.schedules import SCHEDULES, WIRE_BYTES
from dist.cost.zero_schedules import zero_3_steps

DEDICATED = "reduce-bcast/dedicated"
# Of a step's computing, backward is two thirds: two products for each of forward's.
BACKWARD = 2 / 3
# Whose exchange may run beside the last micro-step, and beside how much of it: backward, or the next forward too.
BUCKETED = {"ring": BACKWARD, "tree": BACKWARD, "hierarchical": BACKWARD, "hierarchical-sharded": 1.0}
# The bucket that becomes final last: 4 MiB, or an eighth of a small vector.
BUCKET_BYTES, LARGEST_BUCKET = 4 << 20, 1 / 8
ABOUT_EQUAL = 1.01


@dataclass(frozen=True)
class Training:
    """What a step has to do. compute_s: forward and backward of all micro-steps, all ranks at it; update_s: AdamW over
    the whole vector on one rank; ranges, micro_steps: as dist.cost.schedules.schedule's.
    """

    parameters: int
    compute_s: float
    wire: str = "float32"
    ranges: tuple[int, ...] = ()
    micro_steps: int = 1
    update_s: float = 0.0


def advise(cluster: Cluster, training: Training, library: str) -> list[dict]:
    """A row of plain values for each strategy, the shortest step first; unknown ones, with None, last.

    Times are seconds; bytes_in and bytes_out are the largest over the nodes.
    """
    names = [*SCHEDULES, *([DEDICATED] if len(cluster.placement) > 1 else [])]
    rows = [row(name, cluster, training, library) for name in names]
    return sorted(rows, key=lambda row: float("inf") if row["step_s"] is None else best_step_s(row))


def row(name: str, cluster: Cluster, training: Training, library: str) -> dict:
    strategy, ranks, wire = name.split("/")[0], len(cluster.placement), training.wire
    memory = rank_memory(strategy, training.parameters, ranks, cluster.nodes)
    result = dict.fromkeys(("exchange_s", "times_bound", "bytes_in", "bytes_out", "step_s", "step_overlapped_s"))
    result |= {"strategy": name, "memory_bytes": memory.total, "memory_formula": memory.formula, "unknown": None}
    size = training.parameters * WIRE_BYTES[wire]
    try:
        prediction = predict(strategy, cluster, size, library, wire, training.ranges, training.micro_steps)
    except UnknownChoice as unknown:
        return result | {"unknown": str(unknown)}
    seconds, bound = prediction.seconds, lower_bound_s(cluster, size)
    busy_s = training.compute_s * (ranks / (ranks - 1) if name == DEDICATED else 1)
    update_s = training.update_s * memory.optimizer / (2 * VECTOR_BYTES * training.parameters)
    overlapped_s = overlapped_step_s(strategy, seconds, busy_s, training)
    return result | {
        "exchange_s": seconds,
        "times_bound": seconds / bound if bound else None,
        "bytes_in": int(prediction.bytes_in.max()),
        "bytes_out": int(prediction.bytes_out.max()),
        "step_s": busy_s + seconds + update_s,
        "step_overlapped_s": None if overlapped_s is None else overlapped_s + update_s,
        "algorithms": prediction.algorithms,
    }


def overlapped_step_s(strategy: str, exchange_s: float, compute_s: float, training: Training) -> float | None:
    """None where nothing of the exchange can run beside computing."""
    parts = overlap_of(strategy, training)
    if parts is None:
        return None
    part, last, beside = parts
    early_s = part * exchange_s
    return compute_s + exchange_s - early_s + exposed_s(early_s, beside * compute_s, last * early_s)


def overlap_of(strategy: str, training: Training) -> tuple[float, float, float] | None:
    """(part of the exchange that may run beside computing, how much of that always shows, part of the computing).

    Buckets wait for the last micro-step's backward, and its last bucket shows. ZeRO's reductions run in all of them,
    and in each the embeddings' shows, whose gradient is the last; gathers run before each use, the embeddings' first.
    """
    if strategy in BUCKETED:
        last = min(LARGEST_BUCKET, BUCKET_BYTES / (training.parameters * WIRE_BYTES[training.wire]))
        return 1.0, last, BUCKETED[strategy] / training.micro_steps
    embeddings = training.ranges[0] / training.parameters if training.ranges else 0.0
    if strategy == "zero-2":
        return 1.0, embeddings, 1.0
    if strategy == "zero-3":
        steps = zero_3_steps(len(training.ranges), training.micro_steps)
        ranges = training.ranges or (training.parameters,)
        vectors = sum(ranges[index] for _, index in steps) / training.parameters
        return 1.0, embeddings * (training.micro_steps + 1) / vectors, 1.0
    return None


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
