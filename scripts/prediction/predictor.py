"""Predict a step with a strategy on given nodes and links, from the cost model and the strategy's declarations.

advise.py prints the prediction for every strategy and recommends one; diagnose.py prints it for all strategies except
the run's own; figures draw it beside the measurement.
"""

from dataclasses import dataclass, replace

import numpy as np

from dist.cost.memory import RankMemory
from dist.cost.messages import Setting, message_schedule
from dist.cost.model import Cluster, Prediction, lower_bound_s, predict, predict_rows
from dist.cost.mpi_choices import UnknownChoice
from dist.cost.overlap import Overlap, Training
from dist.cost.stages import Stage
from dist.wire import WIRE_BYTES
from strategies import BASELINE, STRATEGIES, Strategy

ONE_NODE_RATE = 10e9  # bytes/s; on one node no port limits anything, but the model needs a number
ABOUT_EQUAL = 1.01  # steps within a percent
WORTH_OTHER_WEIGHTS = 1.3  # how much shorter a step must be before a strategy with other weights is named
OTHER_WEIGHTS = "* approximate: the loss after the same number of steps may be worse, see compare.py --by-time"


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step, in seconds.

    name: of the strategy, with /dedicated for a dedicated server. memory, update_s: without overlap, maximum over
    ranks. unknown: why `exchange` and the times are None. compute_s: forward and backward. overlap: how much of the
    exchange can be hidden, None for nothing. rows: with overlap, the exposed exchange of a sparse embedding gradient.
    overlapped_memory: the memory with overlap, if it differs. same_weights: see Traits.
    """

    name: str
    memory: RankMemory
    unknown: str | None = None
    exchange: Prediction | None = None
    compute_s: float = 0.0
    update_s: float = 0.0
    overlap: Overlap | None = None
    rows: Prediction | None = None
    overlapped_memory: RankMemory | None = None
    same_weights: bool = True

    @property
    def step_s(self) -> float | None:
        """The seconds of a step without overlap."""
        return None if self.exchange is None else self.compute_s + self.exchange.seconds + self.update_s

    @property
    def overlapped_s(self) -> float | None:
        if self.exchange is None or self.overlap is None:
            return None
        rows_s = self.rows.seconds if self.rows else 0.0
        return self.overlap.step_s(self.exchange.seconds, self.compute_s) + rows_s + self.update_seconds(True)

    def seconds(self, overlapped: bool) -> float | None:
        """Return the seconds of a step: with overlap if `overlapped` and the strategy can, else without."""
        return self.step_s if self.overlapped_s is None or not overlapped else self.overlapped_s

    def held(self, overlapped: bool) -> RankMemory:
        """Return the memory of a rank: with overlap if `overlapped` and the strategy can, else without."""
        return (overlapped and self.overlap and self.overlapped_memory) or self.memory

    def update_seconds(self, overlapped: bool) -> float:
        return self.update_s * self.held(overlapped).optimizer / self.memory.optimizer

    def scaled(self, factor: float) -> "PredictedStep":
        """Return the step with an exchange that takes `factor` times as long."""
        exchange, rows = (one and replace(one, seconds=factor * one.seconds) for one in (self.exchange, self.rows))
        return replace(self, exchange=exchange, rows=rows)


def predicted_exchange(kind: type[Strategy], cluster: Cluster, training: Training, library: str) -> Prediction:
    """Predict the exchange, the mean of all steps. Raise UnknownChoice if the MPI library's algorithm or the messages
    are unknown."""
    exchange = predict(kind.traits.messages, cluster, _setting(kind, cluster.placement, training, library))
    return exchange.divided(training.local_steps) if kind.traits.takes_local_steps else exchange


def exchanged_stages(kind: type[Strategy], placement: list[int], training: Training, library: str) -> list[Stage]:
    """Return the messages between ranks on these nodes. Raise UnknownChoice like predicted_exchange."""
    return message_schedule(kind.traits.messages, _setting(kind, placement, training, library))[0]


def _setting(kind: type[Strategy], placement: list[int], training: Training, library: str) -> Setting:
    if kind.traits.messages is None:
        raise UnknownChoice(f"{kind.name} declares no messages")
    item = kind.traits.item_bytes(training.item_bytes)
    vector = training.parameters, item, library, training.ranges, training.micro_steps, training.own_operation
    return Setting(np.asarray(placement), *vector, training.matrices, training.low_rank)


def predicted_rows(kind: type[Strategy], cluster: Cluster, training: Training, library: str) -> Prediction | None:
    """Predict the exchange of a sparse embedding gradient, if this strategy exchanges it separately."""
    if kind.traits.sparse_messages is None or training.rows is None:
        return None
    return predict_rows(kind.traits.sparse_messages, cluster, training.rows, library)


def predicted_step(kind: type[Strategy], cluster: Cluster, training: Training, library: str, server="colocated"):
    """Predict a strategy's step. A dedicated server computes nothing; the other ranks take its share of the batch."""
    ranks = len(cluster.placement)
    is_dedicated = server == "dedicated"
    name = f"{kind.name}/{server}" if is_dedicated else kind.name
    formulas = kind.traits.memory
    if kind.traits.item_bytes(training.item_bytes) == WIRE_BYTES["int8"]:  # then error feedback is on by default
        formulas = formulas.with_errors()
    memory, overlapped = (
        formulas.of_rank(training.parameters, ranks, cluster.nodes, overlap) for overlap in (False, True)
    )
    same = kind.traits.gives_same_weights(training.item_bytes)
    try:
        exchange = predicted_exchange(kind, cluster, training, library)
    except UnknownChoice as unknown:
        return PredictedStep(name, memory, str(unknown), same_weights=same)
    compute_s = training.compute_s * (ranks / (ranks - 1) if is_dedicated else 1)
    update_s = training.update_s * memory.updated_share(training.parameters)
    rows = predicted_rows(kind, cluster, training, library)
    overlap = kind.traits.overlap(training if rows else replace(training, rows=None))
    return PredictedStep(name, memory, None, exchange, compute_s, update_s, overlap, rows, overlapped, same)


def predicted_steps(cluster: Cluster, training: Training, library: str, own: type[Strategy] | None = None) -> list:
    """Predict the step of each strategy that exchanges, in the registry's order, then with dedicated servers.

    own: a strategy outside the registry, to be predicted as well.
    """
    kinds = [kind for kind in STRATEGIES.values() if kind.traits.exchanges]
    kinds += [own] if own and own.traits.exchanges and own not in kinds else []
    pairs = [(kind, "colocated") for kind in kinds]
    if len(cluster.placement) > 1:
        pairs += [(kind, server) for kind in kinds for server in kind.traits.servers[1:]]
    return [predicted_step(kind, cluster, training, library, server) for kind, server in pairs]


def as_rows(steps: list[PredictedStep], cluster: Cluster, training: Training, factor: float = 1.0) -> list[dict]:
    """Return a row per step, the shortest first, unknown steps (with None) last.

    Times are seconds; bytes_in and bytes_out are the largest over the nodes. factor: scales the exchanges and their
    lower bound.
    """
    bound_s = factor * lower_bound_s(cluster, training.parameters * training.item_bytes)
    steps = [step if step.exchange is None else step.scaled(factor) for step in steps]
    steps = sorted(steps, key=lambda step: float("inf") if step.exchange is None else step.seconds(True))
    return [as_row(step, bound_s) for step in steps]


def as_row(step: PredictedStep, bound_s: float) -> dict:
    result = dict.fromkeys(("exchange_s", "times_bound", "bytes_in", "bytes_out", "step_s", "step_overlapped_s"))
    held = step.held(True)
    result |= {"strategy": step.name, "memory_bytes": held.total, "memory_formula": held.formula}
    result |= {"same_weights": step.same_weights, "unknown": step.unknown}
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


def best_of(rows: list[dict], step_s=best_step_s) -> dict:
    """Return the row with the shortest step; among about equal steps, the row with the least memory.

    Among equal steps, a strategy that only saves memory comes last; --strategy auto does not choose it either.
    """
    equal = [row for row in rows if step_s(row) <= ABOUT_EQUAL * step_s(rows[0])]
    for_memory = {kind.name for kind in STRATEGIES.values() if not kind.traits.auto}
    return min(equal, key=lambda row: (row["strategy"].partition("/")[0] in for_memory, row["memory_bytes"]))


def exact(rows: list[dict]) -> list[dict]:
    """Return the rows of strategies that give the same weights; no others are recommended."""
    return [row for row in rows if row["same_weights"]]


def other_weights(rows: list[dict], best_s: float, step_s=best_step_s) -> list[str]:
    """Name the fastest strategy with other weights and its price; [] if a step is not much shorter than best_s, the
    shortest step with the same weights."""
    shorter = [row for row in rows if not row["same_weights"] and step_s(row) * WORTH_OTHER_WEIGHTS <= best_s]
    return [
        f"{row['strategy']} would make a step {best_s / step_s(row):.1f} times shorter than the best exact "
        "strategy, but only a trial shows how much loss that costs (compare.py --by-time)"
        for row in sorted(shorter, key=step_s)[:1]
    ]


def advice_sentence(rows: list[dict]) -> str:
    """Recommend a strategy, and say why. A second sentence may name one with other weights."""
    known = [row for row in rows if row["step_s"] is not None]
    if not exact(known):
        return "No advice: only a trial shows how much loss these strategies cost (compare.py --by-time)."
    best = best_of(exact(known))
    if best["times_bound"] is None:
        return f"One node: nothing crosses a port, take {best['strategy']}."
    text = f"Take {best['strategy']}: its exchange is {best['times_bound']:.2f} times the lower bound, a step "
    text += f"{short_number(best_step_s(best), 1e3)} ms"
    if best["step_overlapped_s"] is not None:
        text += f" with overlap, {short_number(best['step_s'], 1e3)} without"
    baseline = next((row for row in known if row["strategy"] == BASELINE), None)
    ratio = best_step_s(baseline) / best_step_s(best) if baseline else 1.0
    text += f", {ratio:.1f} times shorter than {BASELINE}'s" if ratio >= 1.05 else ""
    return ". ".join([text, *other_weights(known, best_step_s(best))]) + "."


def short_number(value: float | None, scale: float = 1.0) -> str:
    """Return the number with three digits, or a dash for None."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
