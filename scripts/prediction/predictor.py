"""One predictor: a step with a strategy on described nodes and links, by the cost model and what the strategy declares.

advise.py prints it for every strategy, diagnose.py for all but the run's own, and figures draw it beside what was
measured.
"""

from dataclasses import dataclass

from dist.cost.memory import RankMemory
from dist.cost.model import Cluster, Prediction, predict
from dist.cost.mpi_choices import UnknownChoice
from dist.cost.overlap import Training
from strategies import STRATEGIES, Strategy


@dataclass(frozen=True)
class PredictedStep:
    """name: the strategy's, with its server if that is dedicated. unknown: why `exchange` is None, and the times with
    it. step_s: without overlap; overlapped_s: with it, None where nothing of the exchange can be hidden."""

    name: str
    memory: RankMemory
    unknown: str | None = None
    exchange: Prediction | None = None
    step_s: float | None = None
    overlapped_s: float | None = None

    @property
    def best_s(self) -> float | None:
        return self.step_s if self.overlapped_s is None else self.overlapped_s


def predicted_exchange(kind: type[Strategy], cluster: Cluster, training: Training, library: str) -> Prediction:
    """UnknownChoice where the MPI library's algorithm, or the strategy's messages, are not known."""
    if kind.messages is None:
        raise UnknownChoice(f"{kind.name} declares no messages")
    item = kind.item_bytes(training.item_bytes)
    size = training.parameters * item
    return predict(kind.messages, cluster, size, library, item, training.ranges, training.micro_steps)


def predicted_step(kind: type[Strategy], cluster: Cluster, training: Training, library: str, server="colocated"):
    """The PredictedStep of a strategy. A dedicated server computes nothing: the others do its share of the batch."""
    ranks, is_dedicated = len(cluster.placement), server == "dedicated"
    name = f"{kind.name}/{server}" if is_dedicated else kind.name
    memory = kind.memory.of_rank(training.parameters, ranks, cluster.nodes)
    try:
        exchange = predicted_exchange(kind, cluster, training, library)
    except UnknownChoice as unknown:
        return PredictedStep(name, memory, str(unknown))
    compute_s = training.compute_s * (ranks / (ranks - 1) if is_dedicated else 1)
    update_s = training.update_s * memory.updated_share(training.parameters)
    overlap = kind.overlap(training)
    overlapped_s = None if overlap is None else overlap.step_s(exchange.seconds, compute_s) + update_s
    return PredictedStep(name, memory, None, exchange, compute_s + exchange.seconds + update_s, overlapped_s)


def predicted_steps(cluster: Cluster, training: Training, library: str, own: type[Strategy] | None = None) -> list:
    """The PredictedStep of each strategy that exchanges, in the order of the registry; then with dedicated servers.

    own: a strategy that is not in the registry, to be predicted with the others.
    """
    kinds = [kind for kind in STRATEGIES.values() if kind.exchanges]
    kinds += [own] if own and own.exchanges and own not in kinds else []
    pairs = [(kind, "colocated") for kind in kinds]
    if len(cluster.placement) > 1:
        pairs += [(kind, server) for kind in kinds for server in kind.servers[1:]]
    return [predicted_step(kind, cluster, training, library, server) for kind, server in pairs]
