"""Replay a measured run: predict its step with other strategies, on other links and on other nodes."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dist.cost.model import Cluster
from dist.cost.overlap import Training
from gpt2.errors import UserError
from scripts.prediction.calibration import FASTER, UNCLEAR, UNEXPLAINED, Calibration, MeasuredStep, measured_step
from scripts.prediction.predictor import (
    ONE_NODE_RATE,
    PredictedStep,
    advice_sentence,
    as_rows,
    best_of,
    best_step_s,
    exact,
    other_weights,
    predicted_steps,
    short_number,
)
from scripts.prediction.run_prediction import (
    calibration_of,
    library_of,
    measured_of,
    own_step,
    placement_of,
    training_of,
)
from strategies import Strategy, find
from strategies.compatibility import worker_count
from traces.read.analysis import measure
from traces.read.run_files import Gaps, read_config, read_log, read_measured_at_end
from traces.read.runs import Run, read_run
from traces.record.files import END_LINKS, RunError
from traces.verdict.evidence import gather


@dataclass(frozen=True)
class ReplayedRun:
    """A run folder and its measured step. run: without traces if none are readable. notes: a line per missing fact."""

    run: Run
    kind: type[Strategy]
    measured: MeasuredStep
    notes: list[str]

    @property
    def settings(self) -> dict:
        return self.run.config["settings"]

    @property
    def placement(self) -> list[int]:
        """The node of each rank."""
        return placement_of(self.run)

    @property
    def training(self) -> Training:
        """The compute time and the exchange of a step."""
        return training_of(self.run, self.kind, self.measured)

    @property
    def ranks_of_model(self) -> int:
        """How many ranks share a model."""
        mesh = self.run.config.get("mesh")
        return len(mesh) // (1 + max(place["copy"] for place in mesh)) if mesh else 1

    @property
    def global_batch(self) -> int | None:
        """Sequences of a step; None if the settings do not say."""
        replicas = worker_count(self.settings.get("server"), len(self.placement) // self.ranks_of_model)
        return (self.settings.get("batch_size") or 0) * (self.settings.get("grad_accum") or 1) * replicas or None

    def predicted_s(self, cluster: Cluster, training: Training, library: str) -> float | None:
        """Return the predicted seconds of a step as it ran; None if its exchange is not modelled."""
        if not self.kind.traits.exchanges:
            return self.measured.work_s + self.measured.update_s
        step = own_step(self.run, self.kind, cluster, training, library)
        return step.seconds(bool(self.settings.get("overlap")))


def advise_from_run(path: Path, placement, rate: float | None, latency_s: float | None, library: str | None) -> dict:
    """Return {"strategies": rows as from advise, "measured": the run, "notes": lines, "advice"}.

    None keeps the run's value. On the run's own nodes and links, rows are calibrated and also have "range_s" and
    "compared"; on its links with other nodes, rows are only calibrated. Raise RunError if the folder lacks something.
    """
    replayed = replayed_run(path)
    if replayed.ranks_of_model > 1:
        raise RunError(
            f"{path}: {replayed.ranks_of_model} ranks share a model, but this table needs a whole model per rank: add "
            f"--global-batch {replayed.global_batch or 'G'} to compare other layouts"
        )
    run = replayed.run
    calibration = calibration_of(run, replayed.measured)
    is_own_network = rate is None and library is None
    is_elsewhere = not (is_own_network and placement is None and latency_s is None)
    cluster = replayed_cluster(run, placement, rate, latency_s)
    training = on_cluster(replayed, cluster)
    library = library or library_of(run)
    steps = predicted_steps(cluster, training, library, own=replayed.kind)
    own_s = None if is_elsewhere else replayed.predicted_s(cluster, training, library)
    rows = as_rows(steps, cluster, training, calibration.factor if is_own_network else 1.0)
    if calibration.reason is None and not is_elsewhere:
        rows = compared_rows(rows, steps, calibration)
    measured = {"label": run.label, "step_s": replayed.measured.step_s, "predicted_s": own_s}
    return {
        "strategies": rows,
        "measured": measured | {"factor": calibration.factor if calibration.reason is None else None},
        "notes": [*replayed.notes, measured_note(run.label, calibration, own_s, is_elsewhere, is_own_network)],
        "advice": advice(rows, calibration, is_elsewhere, is_own_network),
    }


def on_cluster(replayed: ReplayedRun, cluster: Cluster) -> Training:
    """Return the training of the run's global batch on another cluster."""
    training = replayed.training
    compute_s = training.compute_s * len(replayed.placement) / len(cluster.placement)
    rows = training.rows
    if rows and list(cluster.placement) != replayed.placement:
        rows = rows.on(cluster.placement)
    return replace(training, compute_s=compute_s, rows=rows)


def compared_rows(rows: list[dict], steps: list[PredictedStep], calibration: Calibration) -> list[dict]:
    """Return calibrated rows with their ranges, the shortest step first; the run's own row has the measured step.

    steps: uncalibrated predictions.
    """
    by_name = {step.name: step for step in steps if step.exchange is not None}
    for row in rows:
        if (step := by_name.get(row["strategy"])) is not None:
            overlaps = step.overlap is not None
            row["step_s"] = calibration.step_s(step, False)
            row["step_overlapped_s"] = calibration.step_s(step, True) if overlaps else None
            row["range_s"] = list(calibration.range(step, overlaps))
            row["compared"] = calibration.compared(step, overlaps)
    return sorted(rows, key=lambda row: float("inf") if row["step_s"] is None else best_step_s(row))


def measured_note(label: str, calibration: Calibration, own_s: float | None, is_elsewhere: bool, is_own_network: bool):
    text = f"measured: {label} {calibration.measured.step_s * 1e3:.0f} ms a step"
    if is_elsewhere:
        text += ", on the run's own nodes and links"
    elif own_s is not None:
        text += f"; predicted {own_s * 1e3:.0f} ms, off by {own_s / calibration.measured.step_s - 1:+.1%}"
    else:
        text += "; what its MPI library does is not modelled"
    if is_own_network and calibration.reason is None:
        text += f"; exchanges are taken to last {calibration.factor:.3g} times as long as the model says"
    return text


def advice(rows: list[dict], calibration: Calibration, is_elsewhere: bool, is_own_network: bool) -> str:
    """Return the advice. On other links or with another library it ignores the measured exchange."""
    if not is_own_network:
        return advice_sentence(rows)
    if calibration.reason is not None:
        return f"No advice: {UNEXPLAINED}: {calibration.reason}."
    if is_elsewhere:
        return advice_sentence(rows)
    known = [row for row in rows if row["step_s"] is not None]
    by_word = {word: [row for row in exact(known) if row["compared"] == word] for word in (FASTER, UNCLEAR)}
    own_text = _ms_range(calibration.measured.step_s, calibration.measured.range)
    text = f"Keep what ran: a step took {own_text}; no strategy with the same weights is predicted to take less"
    if by_word[FASTER]:
        text = f"Take {_row_text(best_of(by_word[FASTER]))}; this run's took {own_text}"
    elif by_word[UNCLEAR]:
        text = f"No clear winner: {_row_text(by_word[UNCLEAR][0])}; this run's took {own_text}"
    return ". ".join([text, *other_weights(known, min(map(best_step_s, exact(known)), default=0.0))]) + "."


def _row_text(row: dict) -> str:
    """Return a text like "ring: a step with overlap would take 244 ms (225 to 262)"."""
    overlap = "" if row["step_overlapped_s"] is None else " with overlap"
    return f"{row['strategy']}: a step{overlap} would take {_ms_range(best_step_s(row), row['range_s'])}"


def _ms_range(seconds: float, ends) -> str:
    return f"{short_number(seconds, 1e3)} ms ({' to '.join(short_number(end, 1e3) for end in ends)})"


def replayed_cluster(run: Run, placement, rate: float | None, latency_s: float | None) -> Cluster:
    """Return the run's cluster with the given replacements; other nodes get the run's median link."""
    own = placement is None
    placement = placement_of(run) if own else placement
    links = list(run.links.values())
    nodes = int(np.max(placement)) + 1
    if nodes > 1 and rate is None and not links:
        raise RunError(f"{run.path} was on one node, so its links are not known: give --link and --latency")
    if latency_s is None:
        latency_s = max((link["latency_s"] for link in links), default=0.0)
    if rate is not None or not links:
        return Cluster(placement, rate or ONE_NODE_RATE, rate or ONE_NODE_RATE, latency_s)
    rates = [np.array([link[way] for link in links], float) for way in ("in", "out")]
    if not own or len(links) != nodes:
        rates = [float(np.median(way)) for way in rates]
    return Cluster(placement, *rates, latency_s, nominal=False)


def replayed_run(path: Path) -> ReplayedRun:
    """Read a run folder. Raise RunError if it has no configuration, or no complete step."""
    config = read_config(path)
    missing = next((name for name in ("ranks", "mpi_library", "parameters") if config.get(name) is None), None)
    if missing:
        raise RunError(f"{path}/config.json lacks {missing!r}: it is not what scripts/train.py writes")
    strategy = config["settings"]["strategy"]
    if not config["ranks"]:
        raise RunError(f"{path}/config.json says strategy {strategy} on 0 ranks: restore it")
    try:
        kind = find(strategy)
    except UserError as error:
        raise RunError(f"{path}/config.json: {error}") from None
    run = Run(path, config, [], [], end_links=read_measured_at_end(path / "traces", END_LINKS, Gaps(allowed=True)))
    notes = []
    measured = traced_step(path, len(config["ranks"]), notes) or logged_step(path, notes)
    if measured is None:
        raise RunError(f"{path} has no complete step in its traces or log.jsonl: train for a few more steps")
    return ReplayedRun(run, kind, measured, notes)


def traced_step(path: Path, ranks: int, notes: list[str]) -> MeasuredStep | None:
    """Measure a step from the traces of the ranks that have any; None without a complete step."""
    try:
        run = read_run(path, allow_missing=True)
    except RunError as error:
        notes.append(str(error))
        return None
    run = replace(run, ranks=[trace for trace in run.ranks if len(trace.records)])
    if not run.ranks:
        return None
    if len(run.ranks) < ranks:
        notes.append(f"{len(run.ranks)} of {ranks} ranks left traces: the others' times are not known")
    try:
        return measured_of(gather(run, measure(run)))
    except RunError:
        return None


def logged_step(path: Path, notes: list[str]) -> MeasuredStep | None:
    """Measure a step from log.jsonl, where everything except exchange counts as computing."""
    rows = [row for row in read_log(path, Gaps(allowed=True)) if {"step_s", "exposed_exchange_s"} <= row.keys()]
    if not rows:
        return None
    notes.insert(0, "no step is complete in the traces: from log.jsonl, what is not exchange counts as computing")
    steps_s, exchange_s = np.array([(row["step_s"], row["exposed_exchange_s"]) for row in rows], float).T
    return measured_step(steps_s, float(np.median(exchange_s)), 0.0)
