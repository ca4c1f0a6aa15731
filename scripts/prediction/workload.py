"""The workload of advise.py --global-batch, described by flags or taken from a run."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dist.cost.model import Cluster
from dist.cost.mpi_choices import UnknownChoice
from dist.cost.overlap import Training
from gpt2.config import GPT2Config
from scripts.prediction.model_parallel_run import own_step_s, replica_training
from scripts.prediction.replayed_run import ReplayedRun, replayed_cluster, replayed_run
from scripts.prediction.run_prediction import NO_LINKS, ONE_NODE, config_of, library_of
from traces.read.analysis import measure
from traces.read.runs import read_run
from traces.record.files import RunError


@dataclass(frozen=True)
class Workload:
    """A training step of global_batch sequences of `length` tokens, in microbatches of batch_size sequences.

    training: of the whole model, with the compute_s of ranks that each have a replica. memory_bytes: the limit per
    rank, None for no limit.
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
    """Return (workload, cluster, MPI library, notes) for a run's model. An argument of None keeps the run's value.

    A sequence is assumed to take as long as in the run. Raise RunError if the folder lacks something.
    """
    replayed = replayed_run(path)
    run = replayed.run
    settings = replayed.settings
    config = config_of(settings, run.config["parameters"])
    if config is None or replayed.global_batch is None or not settings.get("seq_len"):
        raise RunError(
            f"{path}/config.json lacks the shape of its model or batches: describe them with --model, "
            "--nodes, --link and --compute-ms instead"
        )
    cluster = replayed_cluster(run, placement, rate, latency_s)
    training, own = own_training(replayed)
    times = global_batch / replayed.global_batch
    rows = training.rows and training.rows.on(cluster.placement, times)
    compute_s = times * training.compute_s * len(replayed.placement) / len(cluster.placement)
    training = replace(training, compute_s=compute_s, rows=rows)
    workload = Workload(
        config, global_batch, batch_size or settings["batch_size"], settings["seq_len"], training, memory_bytes
    )
    note = f"measured: {run.label} {replayed.measured.step_s * 1e3:.0f} ms a step, {own}"
    return workload, cluster, library or library_of(run), [*replayed.notes, note]


def own_training(replayed: ReplayedRun) -> tuple[Training, str]:
    """Return (the training as if each rank had a replica, a text on how well the run's step is predicted)."""
    measured = replayed.measured
    if replayed.ranks_of_model > 1:
        run = read_run(replayed.run.path)
        times = measure(run)
        training = replica_training(run, times, measured, replayed.kind)
        predict = partial(own_step_s, run, times, measured)
    else:
        training = replayed.training
        predict = partial(replicated_step_s, replayed)
    try:
        own_s = predict()
    except (RunError, UnknownChoice) as unknown:
        return training, f"not predicted: {unknown}"
    return training, f"predicted {own_s * 1e3:.0f} ms, off by {own_s / measured.step_s - 1:+.1%}"


def replicated_step_s(replayed: ReplayedRun) -> float:
    """Predict the seconds of a step of a run whose ranks have replicas. Raise RunError with the reason on failure."""
    run = replayed.run
    if replayed.kind.traits.exchanges and not run.links:
        raise RunError(ONE_NODE if len(set(replayed.placement)) == 1 else NO_LINKS)
    own_s = replayed.predicted_s(replayed_cluster(run, None, None, None), replayed.training, library_of(run))
    if own_s is None:
        raise RunError("what its MPI library does is not modelled")
    return own_s
