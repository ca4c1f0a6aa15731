"""What the cost model says of a run: its own exchange, and its step with every other strategy."""

import numpy as np

from dist.cost.messages import message_schedule
from dist.cost.model import Cluster, Prediction
from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.cost.overlap import Training
from dist.wire import WIRE_BYTES
from gpt2.errors import UserError
from scripts.prediction.predictor import predicted_exchange, predicted_step
from strategies import STRATEGIES, Strategy, find
from traces.read.runs import Run
from traces.verdict.evidence import PredictedExchange


def strategy_of(run: Run) -> type[Strategy] | None:
    """None where it is a file that is gone, or the control, which exchanges nothing."""
    try:
        kind = find(run.config["settings"]["strategy"])
    except UserError:
        return None
    return kind if kind.exchanges else None


def item_bytes(settings: dict) -> int:
    """Bytes of one gradient as a run with these settings sends it. Runs of old say nothing: they sent float32."""
    return WIRE_BYTES[settings.get("wire") or "float32"]


def cluster_of(run: Run) -> Cluster | None:
    """The run's nodes and links as they were probed; None for a run on one node, which has no rates of ports."""
    links, placement = run.links, placement_of(run)
    nodes = sorted(set(placement))
    if not nodes or not links or set(nodes) - set(links):
        return None
    rates = {way: [links[node][way] for node in nodes] for way in ("in", "out")}
    latency_s = max(link["latency_s"] for link in links.values())
    return Cluster(placement, rates["in"], rates["out"], latency_s, nominal=False)


def placement_of(run: Run) -> list[int]:
    """The node of each rank; nodes are numbered from 0 without gaps."""
    return [place["node"] for place in run.config.get("ranks") or []]


def library_of(run: Run) -> str:
    return library_key(run.config.get("mpi_library") or "")


def training_of(run: Run, compute_s: float = 0.0) -> Training | None:
    """What a step of the run computes and exchanges; None for a run of old, whose config.json does not tell."""
    parameters = run.config.get("parameters")
    return None if parameters is None else Training(parameters, compute_s, item_bytes(run.config["settings"]))


def own_exchange(run: Run) -> Prediction | None:
    """The cost model's exchange of the run's vector over its links; None where it cannot tell."""
    kind, cluster, training = strategy_of(run), cluster_of(run), training_of(run)
    if kind is None or cluster is None or training is None:
        return None
    try:
        return predicted_exchange(kind, cluster, training, library_of(run))
    except UnknownChoice:
        return None


def own_schedule(run: Run) -> PredictedExchange | None:
    """What the run's own strategy sends, for the diagnosis."""
    predicted = own_exchange(run)
    if predicted is None:
        return None
    nodes = sorted(set(placement_of(run)))
    return PredictedExchange(nodes, predicted.bytes_in, predicted.bytes_out, predicted.steps, predicted.seconds)


def predicted_steps(run: Run, step_s: float, exchange_s: float) -> list[dict]:
    """[{"strategy", "predicted_step_s", "speedup"}, ...], the shortest step first, without the run's own strategy.

    step_s: the run's step; exchange_s: of it, what a network without transfer times would save.
    """
    cluster, training = cluster_of(run), training_of(run, max(step_s - exchange_s, 0.0))
    if cluster is None or training is None:
        return []
    settings, rows = run.config["settings"], []
    for name, kind in STRATEGIES.items():
        if kind.exchanges and name != settings["strategy"]:
            step = predicted_step(kind, cluster, training, library_of(run))
            # A run with overlap would keep it with a strategy that can.
            seconds = step.best_s if settings.get("overlap") else step.step_s
            if seconds is not None:
                rows.append({"strategy": name, "predicted_step_s": seconds, "speedup": step_s / seconds})
    return sorted(rows, key=lambda row: row["predicted_step_s"])


def message_matrix(run: Run) -> np.ndarray | None:
    """(N, N) bytes from rank (row) to rank (column) in one exchange; None for a run whose config.json does not tell,
    or one rank."""
    kind, places, parameters = strategy_of(run), run.config.get("ranks"), run.config.get("parameters")
    if not places or not parameters or len(places) < 2 or kind is None or kind.messages is None:
        return None
    item = kind.item_bytes(item_bytes(run.config["settings"]))
    try:
        stages, _ = message_schedule(kind.messages, placement_of(run), parameters * item, library_of(run), item)
    except ValueError:  # UnknownChoice too
        return None
    matrix = np.zeros((len(places), len(places)))
    for stage in stages:
        np.add.at(matrix, (stage.source, stage.destination), stage.size * stage.repeat)
    return matrix
