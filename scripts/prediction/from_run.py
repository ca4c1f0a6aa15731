"""A measured run replayed: what its step would take with another strategy, on other links, on other nodes."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dist.cost.model import Cluster
from dist.cost.mpi_choices import library_key
from dist.cost.overlap import Training
from gpt2.config import GPT2_VOCABULARY, PRESETS, GPT2Config
from gpt2.errors import UserError
from gpt2.parameters import Layout
from scripts.prediction.of_run import item_bytes
from scripts.prediction.predictor import advise
from strategies import Strategy, find
from traces.read.analysis import measure
from traces.read.runs import label_of, read_config, read_log, read_run
from traces.record.files import RunError
from traces.record.phases import INDEX, STEP

WORK = ("data", "forward", "backward")
ONE_NODE_RATE = 10e9  # no port is in the way, and the model needs a number


@dataclass(frozen=True)
class ReplayedRun:
    """What a run folder says about a step: who sat where, over which links, how long ranks computed.

    settings, links: as config.json holds them; kind: its strategy; placement: node of each rank. work_s: a step's data,
    forward and backward on its slowest rank; update_s: AdamW over the whole vector; step_s: the step; medians over
    steps. ranges: elements of what the model uses at once, () if not known. notes: what was missing, a line each.
    """

    path: Path
    settings: dict
    kind: type[Strategy]
    placement: list[int]
    links: list[dict]
    library: str
    parameters: int
    ranges: tuple[int, ...]
    work_s: float
    update_s: float
    step_s: float
    notes: list[str]


def advise_from_run(path: Path, placement, rate: float | None, latency_s: float | None, library: str | None) -> dict:
    """{"strategies": rows as advise's, "measured": the run, "notes": lines}. None: as in the run.

    RunError with one line where the folder says too little.
    """
    run = replayed_run(path)
    cluster = replayed_cluster(run, placement, rate, latency_s)
    settings, label = run.settings, label_of(run.settings)
    workers = len(run.placement) - (settings.get("server") == "dedicated")
    compute_s = run.work_s * workers / len(cluster.placement)  # the same global batch
    training = Training(
        run.parameters, compute_s, item_bytes(settings), run.ranges, settings.get("grad_accum", 1),
        run.update_s,
    )  # fmt: skip
    rows = advise(cluster, training, library or library_key(run.library), own=run.kind)
    own_s, found = None, "; what its MPI library does is not modelled"
    if placement is not None or rate is not None or latency_s is not None or library is not None:
        found = ", on the run's own nodes and links"
    elif (own_s := own_prediction(run, rows)) is not None:
        found = f"; predicted {own_s * 1e3:.0f} ms, off by {own_s / run.step_s - 1:+.1%}"
    return {
        "strategies": rows,
        "measured": {"label": label, "step_s": run.step_s, "predicted_s": own_s},
        "notes": [*run.notes, f"measured: {label} {run.step_s * 1e3:.0f} ms a step{found}"],
    }


def replayed_cluster(run: ReplayedRun, placement, rate: float | None, latency_s: float | None) -> Cluster:
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


def own_prediction(run: ReplayedRun, rows: list[dict]) -> float | None:
    """Predicted seconds of the run's own step; None where its strategy is not modelled."""
    name, settings = run.kind.name, run.settings
    if not run.kind.exchanges:
        return run.work_s + run.update_s
    if settings.get("server") == "dedicated":
        name += "/dedicated"
    row = next(row for row in rows if row["strategy"] == name)
    return row["step_overlapped_s"] if settings.get("overlap") else row["step_s"]


def replayed_run(path: Path) -> ReplayedRun:
    """RunError with one line where nothing can be said: no configuration, or no step that any rank has ended."""
    config, notes = read_config(path), []
    try:
        placement = [place["node"] for place in config["ranks"]]
        parameters, settings = config["parameters"], config["settings"]
        library = config["mpi_library"]
    except (KeyError, TypeError) as missing:
        raise RunError(f"{path}/config.json lacks {missing}: it is not what scripts/train.py writes") from None
    if not placement:
        raise RunError(f"{path}/config.json says strategy {settings['strategy']} on 0 ranks: restore it")
    try:
        kind = find(settings["strategy"])
    except UserError as error:
        raise RunError(f"{path}/config.json: {error}") from None
    times = traced_times(path, len(placement), notes) or logged_times(path, notes)
    if times is None:
        raise RunError(
            f"{path} holds no complete step, in its traces or in log.jsonl: let the run go on for some steps"
        )
    work_s, own_update_s, step_s = times
    memory = kind.memory.of_rank(parameters, len(placement), max(placement) + 1)
    return ReplayedRun(
        path, settings, kind, placement, config.get("links") or [], library, parameters,
        model_ranges(settings, parameters), work_s, own_update_s / memory.updated_share(parameters), step_s, notes,
    )  # fmt: skip


def traced_times(path: Path, ranks: int, notes: list[str]) -> tuple[float, float, float] | None:
    """(work, update, step) in seconds from the traces of the ranks that left any; None without a complete step."""
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
        seconds = measure(run).seconds
    except RunError:
        return None
    work = seconds[:, :, [INDEX[name] for name in WORK]].sum(axis=2).max(axis=1)
    update, step = (seconds[:, :, INDEX[name]].max(axis=1) for name in ("update", STEP))
    return float(np.median(work)), float(np.median(update)), float(np.median(step))


def logged_times(path: Path, notes: list[str]) -> tuple[float, float, float] | None:
    """The same from log.jsonl: what is not exchange counts as work."""
    rows = [row for row in read_log(path, allow_missing=True) if {"step_s", "exposed_exchange_s"} <= row.keys()]
    if not rows:
        return None
    notes.insert(0, "no step is complete in the traces: from log.jsonl, what is not exchange counts as computing")
    step_s, exchange_s = np.median([(row["step_s"], row["exposed_exchange_s"]) for row in rows], axis=0)
    return float(step_s - exchange_s), 0.0, float(step_s)


def model_ranges(settings: dict, parameters: int) -> tuple[int, ...]:
    """Elements of the embeddings, each layer and the last LayerNorm; () where the settings do not say."""
    config = PRESETS.get(settings.get("model") or "baby", PRESETS["baby"])
    shape = {name: settings.get(name) or getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "context")}
    tokens = GPT2_VOCABULARY if settings.get("train_data") or settings.get("tokenizer") == "gpt2" else 256
    vocabulary = settings.get("vocab_size") or max(config.vocab_size, tokens)
    try:
        layout = Layout(GPT2Config(**shape, vocab_size=vocabulary))
    except UserError:
        return ()
    if layout.count != parameters:
        return ()
    return tuple(stop - start for start, stop in layout.ranges)
