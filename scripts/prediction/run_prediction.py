"""Predict a run with the cost model: its own exchange, and its step with every other strategy."""

from dataclasses import replace

import numpy as np

from dist.cost.model import Cluster, Prediction
from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.cost.overlap import Training
from dist.cost.sparse_rows import Rows
from dist.wire import WIRE_BYTES
from gpt2.config import GPT2_VOCABULARY, PRESETS, GPT2Config
from gpt2.errors import UserError
from gpt2.parameters import Layout
from scripts.prediction.calibration import FASTER, Calibration, MeasuredStep, calibrate, measured_step
from scripts.prediction.predictor import (
    PredictedStep,
    best_of,
    exact,
    exchanged_stages,
    other_weights,
    predicted_exchange,
    predicted_rows,
    predicted_step,
)
from scripts.settings.split_embedding import PAYS_UP_TO
from strategies import STRATEGIES, Strategy, find
from strategies.compatibility import worker_count
from traces.read.runs import Run
from traces.verdict.evidence import Evidence, PredictedExchange

ONE_NODE = "all its ranks are on one node, and the model knows links between nodes"
OTHER_PROGRAM = "it is a program of your own, whose exchange the model does not know"
NO_LINKS = "config.json lacks its parameters, or the links of its nodes"


def strategy_of(run: Run) -> type[Strategy] | None:
    """Return the run's strategy; None for a user's program, for the control, or if a strategy's file is missing."""
    if "program" in run.config:
        return None
    try:
        kind = find(run.config["settings"]["strategy"])
    except UserError:
        return None
    return kind if kind.traits.exchanges else None


def item_bytes(settings: dict) -> int:
    """Return the bytes of one gradient on the wire."""
    return WIRE_BYTES[settings.get("wire", "float32")]


def probed_cluster(run: Run) -> Cluster | None:
    """Return the run's nodes and probed links; None on one node, where nothing is probed."""
    links = run.links
    placement = placement_of(run)
    nodes = sorted(set(placement))
    if not nodes or not links or set(nodes) - set(links):
        return None
    rates = {way: [links[node][way] for node in nodes] for way in ("in", "out")}
    latency_s = max(link["latency_s"] for link in links.values())
    return Cluster(placement, rates["in"], rates["out"], latency_s, nominal=False)


def placement_of(run: Run) -> list[int]:
    """Return the node of each rank; nodes are numbered from 0 without gaps."""
    return [place["node"] for place in run.config.get("ranks") or []]


def library_of(run: Run) -> str:
    return library_key(run.config.get("mpi_library") or "")


def training_of(run: Run, kind: type[Strategy], measured: MeasuredStep | None = None) -> Training:
    """Describe the compute time and the exchange of a run's step; without `measured` only the exchange.

    kind: the run's strategy.
    """
    settings = run.config["settings"]
    parameters = run.config["parameters"]
    model = config_of(settings, parameters)
    # The sizes of the embeddings, each layer and the last LayerNorm; none if the model is unknown.
    ranges = tuple(stop - start for start, stop in Layout(model).ranges) if model else ()
    compute_s = 0.0
    update_s = 0.0
    if measured is not None:
        placement = placement_of(run)
        overlaps = bool(settings.get("overlap"))
        memory = kind.traits.memory.of_rank(parameters, len(placement), max(placement) + 1, overlaps)
        # A dedicated server computes nothing. With other strategies all ranks share the batch.
        compute_s = measured.work_s * worker_count(settings.get("server"), len(placement)) / len(placement)
        update_s = measured.update_s / memory.updated_share(parameters)
    return Training(
        parameters, compute_s, item_bytes(settings), ranges, settings.get("grad_accum", 1),
        update_s, settings.get("op") == "own", rows_of(run.config, kind),
        Layout(model).matrices if model else None, settings.get("low_rank", 4), settings.get("local_steps", 1),
    )  # fmt: skip


def rows_of(config: dict, kind: type[Strategy]) -> Rows | None:
    """Return the sparse embedding gradient of a run's first step if it is exchanged separately, else None.

    A run with overlap has recorded this decision if its strategy allows both; for other runs assume a separate exchange
    where it pays. Also return None if config.json lacks the counts.
    """
    settings = config["settings"]
    found = config.get("looked_up") or {}
    model = config_of(settings, config["parameters"])
    if model is None or "of_ranks" not in found or settings.get("split_embedding") == "off":
        return None
    if not found["apart"]:
        decided = settings.get("overlap") and kind.traits.splits_embedding
        if decided or max(found["of_ranks"]) > PAYS_UP_TO * model.padded_vocab_size:
            return None
    return Rows(model.n_embd, tuple(found["of_ranks"]), tuple(found["of_nodes"]), found["any"])


def config_of(settings: dict, parameters: int) -> GPT2Config | None:
    """Return the shape of a run's model; None if its settings give another number of parameters."""
    config = PRESETS.get(settings.get("model") or "baby", PRESETS["baby"])
    shape = {name: settings.get(name) or getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "context")}
    tokens = GPT2_VOCABULARY if settings.get("train_data") or settings.get("tokenizer") == "gpt2" else 256
    vocabulary = settings.get("vocab_size") or max(config.vocab_size, tokens)
    try:
        found = GPT2Config(**shape, vocab_size=vocabulary)
    except UserError:
        return None
    return found if Layout(found).count == parameters else None


def own_exchange(run: Run) -> Prediction | None:
    """Predict the run's exchange over its links, including a separate sparse embedding gradient; None if unknown."""
    kind = strategy_of(run)
    cluster = probed_cluster(run)
    if kind is None or cluster is None or run.config.get("parameters") is None or run.config.get("mesh"):
        return None
    training = training_of(run, kind)
    library = library_of(run)
    try:
        exchange = predicted_exchange(kind, cluster, training, library)
    except UnknownChoice:
        return None
    rows = predicted_rows(kind, cluster, training, library) if run.config["settings"].get("overlap") else None
    return exchange + rows if rows else exchange


def own_schedule(run: Run) -> PredictedExchange | None:
    """Return the bytes that the run's own strategy sends, for the diagnosis."""
    predicted = own_exchange(run)
    if predicted is None:
        return None
    nodes = sorted(set(placement_of(run)))
    return PredictedExchange(nodes, predicted.bytes_in, predicted.bytes_out)


def measured_of(evidence: Evidence) -> MeasuredStep:
    update_s = float(np.median(evidence.times.phase("update").max(axis=1)))
    return measured_step(evidence.times.step_seconds, evidence.transfer_s, update_s)


def others_steps(run: Run, measured: MeasuredStep) -> tuple[list[dict], Calibration]:
    """Predict the run's step with each other strategy. Return (rows, calibration), the shortest step first.

    A row has "strategy", "predicted_step_s", "speedup", "range_s", "memory_bytes", "compared" and "same_weights". There
    are no rows if the model does not explain the run.
    """
    kind = strategy_of(run)
    calibration = calibration_of(run, measured)
    if calibration.reason is not None:
        return [], calibration
    training = training_of(run, kind, measured)
    overlapped = bool(run.config["settings"].get("overlap"))
    rows = []
    for other in (one for one in STRATEGIES.values() if one.traits.exchanges and one is not kind):
        step = predicted_step(other, probed_cluster(run), training, library_of(run))
        if step.exchange is not None:
            # A run with overlap keeps it if the other strategy can overlap.
            seconds = calibration.step_s(step, overlapped)
            row = {"strategy": step.name, "predicted_step_s": seconds, "speedup": measured.step_s / seconds}
            row |= {"range_s": list(calibration.range(step, overlapped)), "memory_bytes": step.held(overlapped).total}
            rows.append(row | {"compared": calibration.compared(step, overlapped), "same_weights": step.same_weights})
    return sorted(rows, key=lambda row: row["predicted_step_s"]), calibration


def calibration_of(run: Run, measured: MeasuredStep) -> Calibration:
    """Compare the predicted step of a run with the measured one."""
    kind = strategy_of(run)
    cluster = probed_cluster(run)
    if kind is None or cluster is None or run.config.get("parameters") is None:
        return Calibration(measured, why_unknown(run, kind))
    own = own_step(run, kind, cluster, training_of(run, kind, measured), library_of(run))
    return calibrate(measured, own, bool(run.config["settings"].get("overlap")))


def own_step(run: Run, kind: type[Strategy], cluster: Cluster, training: Training, library: str) -> PredictedStep:
    """Predict the step of the run's strategy with the run's server."""
    return predicted_step(kind, cluster, training, library, run.config["settings"].get("server", "colocated"))


def advised(rows: list[dict]) -> str | None:
    """Return the name of the best strategy with the same weights that is clearly faster; None if there is none."""
    faster = [row for row in exact(rows) if row["compared"] == FASTER]
    return best_of(faster, lambda row: row["predicted_step_s"])["strategy"] if faster else None


def with_other_weights(rows: list[dict], calibration: Calibration) -> list[str]:
    """Name a strategy with other weights if its step would be much shorter than the run's and all others'; else []."""
    same_s = [row["predicted_step_s"] for row in exact(rows)]
    same_s += [calibration.measured.step_s] if calibration.own and calibration.own.same_weights else []
    return other_weights(rows, min(same_s, default=0.0), lambda row: row["predicted_step_s"])


def why_unknown(run: Run, kind: type[Strategy] | None) -> str:
    """Say why the model cannot predict a run."""
    if "program" in run.config:
        return OTHER_PROGRAM
    if kind is None:
        return f"strategy {run.strategy} exchanges nothing, or is a file that is gone"
    if len(set(placement_of(run))) == 1:
        return ONE_NODE
    return NO_LINKS


def message_matrix(run: Run) -> np.ndarray | None:
    """Return (N, N) bytes from rank (row) to rank (column) in one exchange; None for a single rank or if unknown."""
    kind = strategy_of(run)
    placement = placement_of(run)
    if kind is None or run.config.get("mesh") or not run.config.get("parameters") or len(placement) < 2:
        return None
    training = replace(training_of(run, kind), ranges=(), micro_steps=1)
    try:
        stages = exchanged_stages(kind, placement, training, library_of(run))
    except UnknownChoice:
        return None
    if training.rows and run.config["settings"].get("overlap") and kind.traits.sparse_messages:
        stages = stages + kind.traits.sparse_messages(np.array(placement), training.rows)
    matrix = np.zeros((len(placement), len(placement)))
    for stage in stages:
        np.add.at(matrix, (stage.source, stage.destination), stage.size * stage.repeat)
    return matrix
