"""The workload of advise.py --global-batch, described by flags or taken from a run."""

from dataclasses import dataclass, replace
from pathlib import Path

from dist.cost.model import Cluster
from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.cost.overlap import Training
from gpt2.config import GPT2Config
from scripts.prediction.model_parallel_run import own_step_s, replica_training
from scripts.prediction.predictor import predicted_steps
from scripts.prediction.replayed_run import ReplayedRun, own_prediction, replayed_cluster, replayed_run
from scripts.prediction.run_prediction import NO_LINKS, ONE_NODE, config_of
from traces.read.analysis import measure
from traces.read.runs import label_of, read_run
from traces.record.files import RunError


@dataclass(frozen=True)
class Workload:
    """A training step of global_batch sequences of `length` tokens, in microbatches of batch_size sequences.

    training: the whole model's; its compute_s holds if every rank has a replica. memory_bytes: the limit of a rank,
    None for no limit.
    """

    config: GPT2Config
    global_batch: int
    batch_size: int
    length: int
    training: Training
    memory_bytes: int | None = None


def workload_of_run(
    path: Path, global_batch: int, batch_size: int | None, memory_bytes: int | None, placement, rate, latency_s, library
) -> tuple[Workload, Cluster, str, list[str]]:
    """Return (workload, cluster, MPI library, notes) for a run's model. None keeps the run's value.

    A sequence is assumed to take as long as in the run. Raise RunError if the folder lacks something.
    """
    run = replayed_run(path)
    settings = run.settings
    config = config_of(settings, run.parameters)
    if config is None or run.global_batch is None or not settings.get("seq_len"):
        raise RunError(
            f"{path}/config.json does not say the shape of its model, or of its batches: describe them with --model, "
            "--nodes, --link and --compute-ms instead"
        )
    cluster = replayed_cluster(run, placement, rate, latency_s)
    training, own = own_training(run)
    longer = global_batch / run.global_batch * len(run.placement) / len(cluster.placement)
    rows = training.rows and training.rows.on(cluster.placement, global_batch / run.global_batch)
    training = replace(training, compute_s=longer * training.compute_s, rows=rows)
    workload = Workload(
        config, global_batch, batch_size or settings["batch_size"], settings["seq_len"], training, memory_bytes
    )
    note = f"measured: {label_of(settings)} {run.measured.step_s * 1e3:.0f} ms a step, {own}"
    return workload, cluster, library or library_key(run.library), [*run.notes, note]


def own_training(run: ReplayedRun) -> tuple[Training, str]:
    """Return (the training as if each rank had a replica, a text on how well the model predicts the run's step)."""
    is_model_parallel = run.ranks_of_model > 1
    if is_model_parallel:
        traced = read_run(run.path)
        times = measure(traced)
        training = replica_training(traced, times, run.measured, run.kind)
    else:
        training = run.training()
    try:
        own_s = own_step_s(traced, times, run.measured) if is_model_parallel else replicated_step_s(run, training)
    except (RunError, UnknownChoice) as unknown:
        return training, f"not predicted: {unknown}"
    return training, f"predicted {own_s * 1e3:.0f} ms, off by {own_s / run.measured.step_s - 1:+.1%}"


def replicated_step_s(run: ReplayedRun, training: Training) -> float:
    """Predict the step of a run whose ranks have replicas, in seconds. Raise RunError with the reason if that fails."""
    if run.kind.traits.exchanges and not run.links:
        raise RunError(ONE_NODE if len(set(run.placement)) == 1 else NO_LINKS)
    cluster = replayed_cluster(run, None, None, None)
    own_s = own_prediction(run, predicted_steps(cluster, training, library_key(run.library), run.kind))
    if own_s is None:
        raise RunError("what its MPI library does is not modelled")
    return own_s
