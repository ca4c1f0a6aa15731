"""What advise.py --global-batch is asked, and the same of a run: its model, its computing, its nodes and links."""

from dataclasses import dataclass, replace
from pathlib import Path

from dist.cost.model import Cluster
from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.cost.overlap import Training
from gpt2.config import GPT2Config
from scripts.prediction.from_run import ReplayedRun, own_prediction, replayed_cluster, replayed_run
from scripts.prediction.of_cut_run import cut_training, own_step_s
from scripts.prediction.of_run import NO_LINKS, ONE_NODE, config_of
from scripts.prediction.predictor import predicted_steps
from traces.read.analysis import measure
from traces.read.runs import label_of, read_run
from traces.record.files import RunError


@dataclass(frozen=True)
class Asked:
    """What is to be trained: a step of global_batch sequences of `length` tokens, micro-steps of batch_size.

    training: of the whole model; its compute_s is of such a step with copies alone, all ranks at it. memory_bytes: what
    a rank may hold, None for any.
    """

    config: GPT2Config
    global_batch: int
    batch_size: int
    length: int
    training: Training
    memory_bytes: int | None = None


def asked_of_run(
    path: Path, global_batch: int, batch_size: int | None, memory_bytes: int | None, placement, rate, latency_s, library
) -> tuple[Asked, Cluster, str, list[str]]:
    """(what is to be trained, on what, the MPI library, notes) of a run's model. None: as in the run.

    A sequence takes what it took there. RunError with one line where the folder says too little.
    """
    run = replayed_run(path)
    settings, config = run.settings, config_of(run.settings, run.parameters)
    if config is None or run.global_batch is None or not settings.get("seq_len"):
        raise RunError(
            f"{path}/config.json does not say the shape of its model, or of its batches: describe them with --model, "
            "--nodes, --link and --compute-ms instead"
        )
    cluster, (training, own) = replayed_cluster(run, placement, rate, latency_s), own_training(run)
    longer = global_batch / run.global_batch * len(run.placement) / len(cluster.placement)
    rows = training.rows and training.rows.on(cluster.placement, global_batch / run.global_batch)
    training = replace(training, compute_s=longer * training.compute_s, rows=rows)
    asked = Asked(
        config, global_batch, batch_size or settings["batch_size"], settings["seq_len"], training, memory_bytes
    )
    note = f"measured: {label_of(settings)} {run.measured.step_s * 1e3:.0f} ms a step, {own}"
    return asked, cluster, library or library_key(run.library), [*run.notes, note]


def own_training(run: ReplayedRun) -> tuple[Training, str]:
    """(what its step computes, if each rank had a whole model; in words, how near the model comes to that step)."""
    is_cut, traced, times = run.ranks_of_model > 1, None, None
    if is_cut:
        traced = read_run(run.path)
        times = measure(traced)
        training = cut_training(traced, times, run.measured, run.kind)
    else:
        training = run.training()
    try:
        own_s = own_step_s(traced, times, run.measured) if is_cut else step_of_copies_s(run, training)
    except (RunError, UnknownChoice) as unknown:
        return training, f"not predicted: {unknown}"
    return training, f"predicted {own_s * 1e3:.0f} ms, off by {own_s / run.measured.step_s - 1:+.1%}"


def step_of_copies_s(run: ReplayedRun, training: Training) -> float:
    """Predicted seconds of the step of a run whose ranks have whole models. RunError: the reason why there are none."""
    if run.kind.exchanges and not run.links:
        raise RunError(ONE_NODE if len(set(run.placement)) == 1 else NO_LINKS)
    cluster = replayed_cluster(run, None, None, None)
    own_s = own_prediction(run, predicted_steps(cluster, training, library_key(run.library), run.kind))
    if own_s is None:
        raise RunError("what its MPI library does is not modelled")
    return own_s
