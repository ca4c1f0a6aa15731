"""What a step of a run would take with every other strategy: the run's computing, and the cost model's exchange."""

from dist.cost.model import Cluster, Prediction, predict
from dist.cost.mpi_choices import UnknownChoice
from dist.cost.schedules import SCHEDULES, WIRE_BYTES
from scripts.prediction.advice import Training, overlapped_step_s
from traces.read.runs import Run
from traces.verdict.evidence import PredictedExchange

# Of the strategies, those whose exchange is MPI's send float32 whatever --wire says.
MPI_STRATEGIES = ("reduce-bcast", "sliced", "reduce-scatter", "allreduce")


def predicted_exchange(run: Run, strategy: str) -> Prediction | None:
    """The cost model's exchange of the run's vector over its links; None where it cannot tell.

    Nothing crosses a port on one node, the model has no time for that; a run without links has no rates.
    """
    config, settings = run.config, run.config["settings"]
    links, places = config.get("links"), config.get("ranks")
    if not links or not places or "parameters" not in config or strategy not in SCHEDULES:
        return None
    wire = "float32" if strategy in MPI_STRATEGIES else settings.get("wire") or "float32"
    nodes = sorted({place["node"] for place in places})
    by_node = {link["node"]: link for link in links}
    if set(nodes) - set(by_node):
        return None
    rates = {way: [by_node[node][way] for node in nodes] for way in ("in", "out")}
    latency_s = max(link["latency_s"] for link in links)
    placement = [nodes.index(place["node"]) for place in places]
    cluster = Cluster(placement, rates["in"], rates["out"], latency_s, nominal=False)
    library = "openmpi" if "Open MPI" in config.get("mpi_library", "") else "mpich"
    try:
        return predict(strategy, cluster, config["parameters"] * WIRE_BYTES[wire], library, wire)
    except UnknownChoice:
        return None


def own_schedule(run: Run) -> PredictedExchange | None:
    """What the run's own strategy sends, for the diagnosis."""
    predicted = predicted_exchange(run, run.strategy)
    if predicted is None:
        return None
    nodes = sorted({place["node"] for place in run.config["ranks"]})
    return PredictedExchange(nodes, predicted.bytes_in, predicted.bytes_out, predicted.steps, predicted.seconds)


def predicted_steps(run: Run, step_s: float, exchange_s: float) -> list[dict]:
    """[{"strategy", "predicted_step_s", "speedup"}, ...], the shortest step first, without the run's own strategy.

    step_s: the run's step; exchange_s: of it, what a network without transfer times would save.
    """
    rest_s = max(step_s - exchange_s, 0.0)
    rows = []
    for strategy in SCHEDULES:
        predicted = predicted_exchange(run, strategy) if strategy != run.strategy else None
        if predicted is not None:
            seconds = _step_s(run, strategy, predicted.seconds, rest_s)
            rows.append({"strategy": strategy, "predicted_step_s": seconds, "speedup": step_s / seconds})
    return sorted(rows, key=lambda row: row["predicted_step_s"])


def _step_s(run: Run, strategy: str, exchange_s: float, rest_s: float) -> float:
    """A run with overlap would keep it with a strategy that can."""
    settings = run.config["settings"]
    training = Training(run.config["parameters"], rest_s, settings.get("wire") or "float32")
    overlapped_s = overlapped_step_s(strategy, exchange_s, rest_s, training) if settings.get("overlap") else None
    return rest_s + exchange_s if overlapped_s is None else overlapped_s
