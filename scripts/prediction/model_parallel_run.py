"""Predict the step of a run with tensor or pipeline parallelism, from the measured compute times of its stages.

The pipeline, its messages and the exchange between replicas are predicted; the compute times are the run's own.
"""

from dataclasses import replace

import numpy as np

from dist.cost.model import Cluster
from dist.cost.model_parallel import Seats
from dist.cost.mpi_choices import UnknownChoice
from dist.cost.overlap import Training
from gpt2.config import GPT2Config
from scripts.prediction.calibration import Calibration, MeasuredStep
from scripts.prediction.cut_step import CutStep
from scripts.prediction.predictor import ONE_NODE_RATE
from scripts.prediction.run_prediction import (
    NO_LINKS,
    ONE_NODE,
    config_of,
    item_bytes,
    library_of,
    measured_of,
    placement_of,
    probed_cluster,
    strategy_of,
    why_unknown,
)
from scripts.settings.model_parallel import ModelCut
from strategies import Strategy
from traces.read.analysis import StepTimes
from traces.read.run_mesh import RunMesh
from traces.read.runs import Run
from traces.record.files import RunError
from traces.verdict.evidence import Evidence

# Phases in which a stage is busy. Sums over shards belong here: in them each shard waits for the slowest.
STAGE_PHASES = ("data", "forward", "backward", "tensor", "send")


def model_parallel_facts(evidence: Evidence) -> dict:
    """Return Calibration.facts with the run's own "predicted_step_s"; if it is None, "own_unknown" says why."""
    run = evidence.run
    measured = measured_of(evidence)
    reason = f"several ranks share a model; advise.py --from-run {run.path} --global-batch G compares other cuts"
    step_s = None
    unknown = None
    try:
        step_s = own_step_s(run, evidence.times, measured)
    except (RunError, UnknownChoice) as error:
        unknown = str(error)
    return Calibration(measured, reason).facts() | {"predicted_step_s": step_s, "own_unknown": unknown}


def own_step_s(run: Run, times: StepTimes, measured: MeasuredStep) -> float:
    """Predict the run's own step, in seconds. Raise RunError or UnknownChoice with the reason if that fails."""
    cluster = model_parallel_cluster(run)
    kind = strategy_of(run)
    is_on_one_node = len(set(placement_of(run))) == 1
    step = cut_step_of(run, times, cluster)
    if step.seats.copies > 1 and (kind is None or is_on_one_node):
        raise RunError(ONE_NODE if kind else why_unknown(run, kind))
    overlaps = bool(run.config["settings"].get("overlap"))
    exchange_s = step.exchange_s(kind, overlaps) if kind else 0.0
    return float(step.ends_s.max()) + exchange_s + measured.update_s


def model_parallel_cluster(run: Run) -> Cluster:
    """Return the run's nodes and probed links; a single node gets a rate that limits nothing."""
    placement = placement_of(run)
    if len(set(placement)) == 1:
        return Cluster(placement, ONE_NODE_RATE, ONE_NODE_RATE, 0.0)
    cluster = probed_cluster(run)
    if cluster is None:
        raise RunError(NO_LINKS)
    return cluster


def cut_step_of(run: Run, times: StepTimes, cluster: Cluster) -> CutStep:
    """Return the run's step on the cluster of its ranks. Raise RunError if the folder lacks something."""
    settings = run.config["settings"]
    ranks = len(placement_of(run))
    config = config_of(settings, run.config.get("parameters"))
    if config is None or not settings.get("batch_size") or not settings.get("seq_len"):
        raise RunError("config.json lacks the shape of its model or batches")
    if run.mesh is None or len(run.ranks) < ranks:
        raise RunError(f"{len(run.ranks)} of {ranks} ranks left traces, and the times of all stages are needed")
    cut = cut_of(settings, config, run.mesh)
    training = Training(
        run.config["parameters"], 0.0, item_bytes(settings), own_operation=settings.get("op") == "own",
        low_rank=settings.get("low_rank", 4),
    )  # fmt: skip
    seats = Seats(cluster, cut.tensor, cut.pipeline)
    stage_s = stage_seconds(run, times) / cut.micro_steps
    batch_size = settings["batch_size"]
    return CutStep(config, cut, batch_size, settings["seq_len"], seats, training, stage_s, library_of(run))


def stage_seconds(run: Run, times: StepTimes) -> np.ndarray:
    """Return the busy seconds of each stage in a step, (p,): medians over its ranks and over steps."""
    busy = times.phase(*STAGE_PHASES)
    return np.array([np.median(busy[:, run.mesh.stage == stage]) for stage in range(run.mesh.stages)])


def cut_of(settings: dict, config: GPT2Config, mesh: RunMesh) -> ModelCut:
    """Return the cut that config.json and the traces describe. Raise RunError if they contradict each other."""
    layers = tuple(map(int, (settings.get("pipeline_layers") or str(config.n_layer)).split(",")))
    if len(layers) != mesh.stages or sum(layers) != config.n_layer or mesh.shards > config.n_head:
        raise RunError(
            f"config.json says layers {','.join(map(str, layers))}, the traces {mesh.stages} stages and {mesh.shards} "
            "parts, which do not match"
        )
    schedule = settings.get("pipeline_schedule") or "1f1b"
    return ModelCut(mesh.shards, mesh.stages, layers, schedule, settings.get("grad_accum") or 1)


def replica_training(run: Run, times: StepTimes, measured: MeasuredStep, kind: type[Strategy]) -> Training:
    """Return the training for the run's global batch as if each rank had a replica."""
    step = cut_step_of(run, times, model_parallel_cluster(run))
    compute_s = float(np.median(times.phase("forward", "backward").mean(axis=1)))
    share = step.updated_share(kind, bool(run.config["settings"].get("overlap")))
    return replace(step.training, compute_s=compute_s, update_s=measured.update_s / share)
