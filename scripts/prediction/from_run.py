"""A measured run replayed: what its step would take with another strategy, on other links, on other nodes."""

from pathlib import Path

import numpy as np

from dist.cost.model import Cluster
from dist.cost.mpi_choices import library_key
from dist.cost.overlap import Training
from scripts.prediction.advice import advise
from scripts.prediction.measured_run import MeasuredRun, read_measured_run
from scripts.prediction.steps import item_bytes
from traces.record.files import RunError

ONE_NODE_RATE = 10e9  # no port is in the way, and the model needs a number


def advise_from_run(path: Path, placement, rate: float | None, latency_s: float | None, library: str | None) -> dict:
    """{"strategies": rows as advise's, "measured": the run, "notes": lines}. None: as in the run.

    RunError with one line where the folder says too little.
    """
    run = read_measured_run(path)
    cluster = replayed_cluster(run, placement, rate, latency_s)
    ranks, settings = len(cluster.placement), run.settings
    compute_s = run.work_s * run.workers / ranks  # the same global batch
    training = Training(
        run.parameters, compute_s, item_bytes(settings), run.ranges, settings.get("grad_accum", 1),
        run.update_s,
    )  # fmt: skip
    rows = advise(cluster, training, library or library_key(run.library), own=run.kind)
    notes, own = list(run.notes), None
    if placement is None and rate is None and latency_s is None and library is None:
        own = own_prediction(run, rows)
        notes.append(measured_line(run, own))
    else:
        notes.append(f"measured: {label(run)} {run.step_s * 1e3:.0f} ms a step, on the run's own nodes and links")
    return {
        "strategies": rows,
        "measured": {"label": label(run), "step_s": run.step_s, "predicted_s": own},
        "notes": notes,
    }


def replayed_cluster(run: MeasuredRun, placement, rate: float | None, latency_s: float | None) -> Cluster:
    """The run's, or what is given in its place; other nodes have the run's median link."""
    own = placement is None
    placement = run.placement if own else placement
    nodes = int(np.max(placement)) + 1
    if nodes > 1 and rate is None and not run.links:
        raise RunError(f"{run.path} was on one node, so its links are not known: give --link and --latency")
    if latency_s is None:
        latency_s = max((link["latency_s"] for link in run.links), default=0.0)
    if rate is not None or not run.links:
        return Cluster(placement, rate or ONE_NODE_RATE, rate or ONE_NODE_RATE, latency_s)
    rates = [np.array([link[way] for link in run.links], float) for way in ("in", "out")]
    if not own or len(run.links) != nodes:
        rates = [float(np.median(way)) for way in rates]
    return Cluster(placement, *rates, latency_s, nominal=False)


def own_prediction(run: MeasuredRun, rows: list[dict]) -> float | None:
    """Predicted seconds of the run's own step; None where its strategy is not modelled."""
    name, settings = run.kind.name, run.settings
    if not run.kind.exchanges:
        return run.work_s + run.update_s
    if settings.get("server") == "dedicated":
        name += "/dedicated"
    row = next(row for row in rows if row["strategy"] == name)
    return row["step_overlapped_s"] if settings.get("overlap") else row["step_s"]


def measured_line(run: MeasuredRun, predicted_s: float | None) -> str:
    text = f"measured: {label(run)} {run.step_s * 1e3:.0f} ms a step"
    if predicted_s is None:
        return f"{text}; what its MPI library does is not modelled"
    return f"{text}; predicted {predicted_s * 1e3:.0f} ms, off by {predicted_s / run.step_s - 1:+.1%}"


def label(run: MeasuredRun) -> str:
    settings = run.settings
    options = {
        "dedicated": settings.get("server") == "dedicated",
        "bfloat16": settings.get("wire") == "bfloat16",
        "overlap": settings.get("overlap"),
    }
    return " ".join([run.kind.name, *(name for name, given in options.items() if given)])
