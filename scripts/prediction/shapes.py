"""Predict step and memory for every combination of replicas, tensor-parallel shards and pipeline stages.

A stage computes its share of the model's operations (gpt2/pipeline.py). Sums over shards go through a node's memory at
--memory-rate. cut_step.py predicts the rest. In the rows, "copies" are replicas and "parts" are shards.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from math import gcd

import numpy as np

from dist.cost.memory import VECTOR_BYTES
from dist.cost.model import Cluster
from dist.cost.model_parallel import Seats, head_bytes, pipeline_bytes, tensor_bytes
from dist.cost.mpi_choices import UnknownChoice
from gpt2.pipeline import layers_by_flops, operations
from scripts.prediction.cut_step import CutStep
from scripts.prediction.predictor import best_of, short_number
from scripts.prediction.workload import Workload
from scripts.settings.model_parallel import ModelCut
from strategies import AUTO, STRATEGIES, candidates

SCHEDULE = "1f1b"
LEAST_SHOWN = 0.005  # of a step
SHARES = {
    "bubble": "bubble",
    "sums": "sums over shards",
    "links": "messages between stages",
    "exchange": "the replicas' exchange",
}


def shapes(workload: Workload, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Yield (replicas, shards, stages) whose product is all ranks, with shards within nodes and whole microbatches.

    There are at most as many shards as heads, and at most as many stages as layers (one more without shards).
    """
    ranks = len(cluster.placement)
    within = reduce(gcd, np.bincount(cluster.placement).tolist())
    for parts in (parts for parts in range(1, min(within, workload.config.n_head) + 1) if within % parts == 0):
        for stages in range(1, min(ranks // parts, workload.config.n_layer + (parts == 1)) + 1):
            copies, rest = divmod(ranks, parts * stages)
            if rest == 0 and workload.global_batch % (workload.batch_size * copies) == 0:
                yield copies, parts, stages


def advise_shapes(workload: Workload, cluster: Cluster, library: str) -> list[dict]:
    """Return a row per shape, in seconds and bytes: shapes that fit into memory first, then the shortest step first.

    Raise ValueError if no shape is possible.
    """
    rows = [row_of(workload, cluster, parts, stages, library) for _, parts, stages in shapes(workload, cluster)]
    if not rows:
        raise ValueError(
            f"{len(cluster.placement)} ranks allow no number of replicas that divides the "
            f"{workload.global_batch // workload.batch_size} microbatches of --global-batch / --batch-size, expected "
            "at least one: choose another --global-batch, or other --ranks"
        )
    return sorted(rows, key=lambda row: (not row["fits"], row["step_s"]))


def step_of(workload: Workload, cluster: Cluster, parts: int, stages: int, library: str) -> tuple[CutStep, np.ndarray]:
    """Return (the step of a shape, the seconds of each stage's sums over shards in a microbatch, (stages,))."""
    config = workload.config
    seats = Seats(cluster, parts, stages)
    micro_steps = workload.global_batch // (workload.batch_size * seats.copies)
    layers = layers_by_flops(config, stages, workload.length, least_last=0 if parts == 1 else 1)
    cut = ModelCut(parts, stages, layers, SCHEDULE, micro_steps)
    activation_bytes = VECTOR_BYTES * workload.batch_size * workload.length * config.n_embd
    sums_bytes = [
        tensor_bytes(parts, activation_bytes, count, stage == 0, stage == stages - 1)
        for stage, count in enumerate(layers)
    ]
    sums_s = np.array(sums_bytes) / cluster.local_rate
    stage_s = computing_s(workload, layers) / micro_steps + sums_s
    step = CutStep(config, cut, workload.batch_size, workload.length, seats, workload.training, stage_s, library)
    return step, sums_s


def computing_s(workload: Workload, layers: tuple[int, ...]) -> np.ndarray:
    """Return each stage's compute time in a step in seconds, (p,), proportional to its share of the operations.

    With equal shares, all ranks compute as long as if every rank had a replica.
    """
    layer, head = operations(workload.config, workload.length)
    shares = np.array(layers) * layer
    shares[-1] += head
    return workload.training.compute_s * len(layers) * shares / shares.sum()


def strategies_of(step: CutStep, limit: float) -> list[dict]:
    """Return a row per strategy with the same weights whose exchange is known, the shortest step first.

    exchange_s: the exposed exchange. memory_bytes: maximum over ranks. If some strategies need at most `limit` bytes,
    return only those. One replica exchanges nothing and takes the strategy with the least memory, like train.py.
    """
    every = [kind for kind in STRATEGIES.values() if kind.traits.exchanges]
    several = [kind for kind in every if kind.traits.gives_same_weights(step.training.item_bytes)]
    alone = [min(reversed(candidates(AUTO, "host").values()), key=step.memory_bytes)]
    kinds = several if step.seats.copies > 1 else alone
    overlapping = {kind: kinds is several and kind.traits.overlap(step.training) is not None for kind in kinds}
    held = {kind: step.memory_bytes(kind, overlaps) for kind, overlaps in overlapping.items()}
    fitting = {kind: memory for kind, memory in held.items() if memory <= limit}
    found = []
    for kind, memory in (fitting or held).items():
        overlaps = overlapping[kind]
        with suppress(UnknownChoice):
            exchange_s = step.exchange_s(kind, overlaps)
            update_s = step.training.update_s * step.updated_share(kind, overlaps)
            step_s = float(step.ends_s.max() + exchange_s + update_s)
            row = {"strategy": kind.name, "overlap": overlaps, "exchange_s": exchange_s}
            found.append(row | {"step_s": step_s, "memory_bytes": memory})
    return sorted(found, key=lambda row: row["step_s"])


def row_of(workload: Workload, cluster: Cluster, parts: int, stages: int, library: str) -> dict:
    """Return the row of a shape with its best strategy, if possible one that fits into memory."""
    step, sums_s = step_of(workload, cluster, parts, stages, library)
    limit = float("inf") if workload.memory_bytes is None else workload.memory_bytes
    rows = strategies_of(step, limit)
    copies = step.seats.copies
    micro_steps = step.cut.micro_steps
    least = min(rows, key=lambda row: row["memory_bytes"])
    best = best_of(rows, lambda row: row["step_s"]) if least["memory_bytes"] <= limit else least
    seconds = {
        "bubble": step.unhindered_s.max() - micro_steps * step.stage_s.mean(),
        "sums": micro_steps * sums_s.mean(),
        "links": step.ends_s.max() - step.unhindered_s.max(),
        "exchange": best["exchange_s"],
    }
    return {
        "copies": copies, "parts": parts, "stages": stages, "layers": [*step.cut.layers], "micro_steps": micro_steps,
        "strategy": best["strategy"] if copies > 1 else None, "overlap": best["overlap"],
        "step_s": best["step_s"],
        "shares": {name: max(0.0, float(of / (best["step_s"] or 1.0))) for name, of in seconds.items()},
        "sums_bytes": round(micro_steps * sums_s.max() * cluster.local_rate),
        "links_bytes": pipeline_bytes(stages, step.rows, micro_steps),
        "head_bytes": head_bytes(stages, step.embedding),
        "memory_bytes": best["memory_bytes"], "fits": best["memory_bytes"] <= limit,
    }  # fmt: skip


def shapes_table(rows: list[dict]) -> str:
    """Return a line per shape."""
    lines = [
        f"{'replicas x shards':<17}{'micro-':>8}  {'':<22}{'step':>8}  {'of a step, %':^36}{'memory':>9}\n"
        f"{'         x stages':<17}{'batches':>8}  {'strategy':<22}{'ms':>8}  "
        f"{''.join(f'{name:>9}' for name in SHARES)}{'GB/rank':>9}"
    ]
    for row in rows:
        shares = "".join(f"{100 * row['shares'][name]:>9.1f}" for name in SHARES)
        lines.append(
            f"{shape_text(row):<17}{row['micro_steps']:>8}  {row['strategy'] or '-':<22}"
            f"{short_number(row['step_s'], 1e3):>8}  {shares}{short_number(row['memory_bytes'], 1e-9):>9}"
            + ("" if row["fits"] else "  does not fit")
        )
    return "\n".join(lines)


def shape_text(row: dict) -> str:
    return f"{row['copies']} x {row['parts']} x {row['stages']}"


def shapes_sentence(rows: list[dict], memory_bytes: int | None) -> str:
    """Recommend a shape with its flags, and say why not the others. rows: from advise_shapes."""
    fitting = [row for row in rows if row["fits"]]
    others = [row for row in rows if not row["fits"]]
    if not fitting:
        least = min(rows, key=lambda row: row["memory_bytes"])
        return (
            f"None fits in {memory_bytes / 1e9:.3g} GB: {shape_text(least)} needs least, "
            f"{least['memory_bytes'] / 1e9:.3g} GB; take more ranks, or a smaller --batch-size or --seq-len."
        )
    best, *slower = fitting
    text = f"Take {shape_text(best)}, {flags_of(best)}: a step {short_number(best['step_s'], 1e3)} ms"
    if others:
        text += f"; {_not_fitting(others, memory_bytes)}"
    text += f"; {_slower(slower, best)}" if slower else ""
    return f"{text}."


def _not_fitting(rows: list[dict], memory_bytes: int) -> str:
    first = min(rows, key=lambda row: row["step_s"])
    many = f"{len(rows)} others do" if len(rows) > 1 else "1 other does"
    return (
        f"{many} not fit in {memory_bytes / 1e9:.3g} GB ({shape_text(first)} needs {first['memory_bytes'] / 1e9:.3g})"
    )


def _slower(rows: list[dict], best: dict) -> str:
    """Describe how much longer the second and the slowest shape take, and where most of their time goes."""
    text = f"{shape_text(rows[0])} takes {_times(rows[0], best)} as long{_mostly(rows[0])}"
    if len(rows) > 1:
        text += f"; {shape_text(rows[-1])}, the slowest, {_times(rows[-1], best)}{_mostly(rows[-1])}"
    return text


def _times(row: dict, best: dict) -> str:
    return f"{row['step_s'] / best['step_s']:.2f} times" if best["step_s"] else "any number of times"


def _mostly(row: dict) -> str:
    """Name the largest share of a step other than computing."""
    largest = max(row["shares"], key=row["shares"].get)
    return f", {row['shares'][largest]:.0%} of it {SHARES[largest]}" if row["shares"][largest] >= LEAST_SHOWN else ""


def flags_of(row: dict) -> str:
    """Return the flags of train.py for a shape."""
    words = [f"--strategy {row['strategy']}"] if row["strategy"] else []
    words += ["--overlap"] if row["overlap"] else []
    words += [f"--tensor-parallel {row['parts']}"] if row["parts"] > 1 else []
    words += [f"--pipeline-parallel {row['stages']}"] if row["stages"] > 1 else []
    return " ".join([*words, f"--grad-accum {row['micro_steps']}"])
