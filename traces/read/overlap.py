"""The exchange that a step shows and the exchange that hides behind its computing."""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes
from traces.read.node_traffic import NodeTraffic
from traces.record.phases import COMPUTE, EXCHANGE, INDEX, PHASES

_EXCHANGE = [INDEX[name] for name in EXCHANGE]


@dataclass(frozen=True)
class Overlap:
    """Per step and rank, (S, R) seconds: `exposed` in exchange phases, of that `waiting` for a rank that was late.

    hidden_share: (S,) part of all ports' bytes that moved while their nodes' leaders computed; None without counters.
    """

    exposed: np.ndarray
    waiting: np.ndarray
    hidden_share: np.ndarray | None

    @property
    def transfer(self) -> np.ndarray:
        """(S, R) seconds of the exchange phases that are not waiting for a late rank."""
        return self.exposed - self.waiting

    @property
    def hidden_s(self) -> float | None:
        """Median over steps of the seconds that hide: as many bytes took their share of the exposed time."""
        if self.hidden_share is None:
            return None
        exposed_share = np.maximum(1 - self.hidden_share, 1e-9)
        return float(np.median(self.transfer.max(axis=1) * self.hidden_share / exposed_share))


def overlap(times: StepTimes, traffic: NodeTraffic | None) -> Overlap:
    exposed = times.seconds[:, :, _EXCHANGE].sum(axis=2)
    waiting = times.waiting[:, :, _EXCHANGE].sum(axis=2)
    return Overlap(exposed, waiting, None if traffic is None else _hidden_share(traffic))


def _hidden_share(traffic: NodeTraffic) -> np.ndarray:
    """(S,)."""
    by_phase = traffic.bytes_in.sum(axis=1) + traffic.bytes_out.sum(axis=1)
    computing = by_phase[:, [INDEX[name] for name in COMPUTE]].sum(axis=1)
    return computing / np.maximum(by_phase[:, [INDEX[name] for name in PHASES]].sum(axis=1), 1)


def spread(seconds: np.ndarray) -> dict[str, np.ndarray]:
    """Median and quartiles over the first axis (steps) of any table: {"median", "low", "high"}."""
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
    return {"median": median, "low": low, "high": high}


def by_node(seconds: np.ndarray, nodes: list[int]) -> np.ndarray:
    """(S, R, ...) seconds of ranks to (S, M, ...) of nodes: of a node its slowest rank, for which others wait."""
    return np.stack([seconds[:, np.array(nodes) == node].max(axis=1) for node in sorted(set(nodes))], axis=1)
