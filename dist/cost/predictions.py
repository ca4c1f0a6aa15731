"""What every strategy's exchange would take on described nodes and links, in one call."""

from dataclasses import dataclass

import numpy as np

from dist.cost.model import Cluster, Prediction, predict
from dist.cost.mpi_choices import UnknownChoice
from dist.cost.schedules import SCHEDULES, WIRE_BYTES


@dataclass(frozen=True)
class Link:
    """Of every node's port: rate in bytes/s each way, and the latency of a message, software included.

    nominal: the rate is the link's own, of which headers take a part; else what a transfer of plain bytes reached.
    """

    rate: float
    latency_s: float
    nominal: bool = True


def predicted_exchange_s(
    strategy: str,
    layout: list[int],
    size_bytes: int,
    link: Link,
    mpi_library: str = "mpich",
    wire: str = "float32",
    node_rates: dict[int, tuple[float, float]] | None = None,
) -> float:
    """Seconds of one exchange. Arguments as predicted_exchanges'; UnknownChoice where the library's is not modelled."""
    size, cluster = wire_bytes(size_bytes, wire), described_cluster(layout, link, node_rates)
    return predict(strategy, cluster, size, mpi_library, wire).seconds


def predicted_exchanges(
    layout: list[int],
    size_bytes: int,
    link: Link,
    mpi_library: str = "mpich",
    wire: str = "float32",
    node_rates: dict[int, tuple[float, float]] | None = None,
    ranges: tuple[int, ...] = (),
    micro_steps: int = 1,
) -> dict[str, Prediction | None]:
    """{strategy: its Prediction, seconds and bytes in and out of each node; None where the library's is not modelled}.

    layout: ranks of each node, which are filled in order. size_bytes: of the vector in float32, half of which travels
    with wire "bfloat16". node_rates: {node: (bytes/s in, bytes/s out)} of ports that are not like `link`. ranges,
    micro_steps: as dist.cost.schedules.schedule's. ValueError with one line for a layout or rates that are none.
    """
    size, cluster, result = wire_bytes(size_bytes, wire), described_cluster(layout, link, node_rates), {}
    for strategy in SCHEDULES:
        try:
            result[strategy] = predict(strategy, cluster, size, mpi_library, wire, ranges, micro_steps)
        except UnknownChoice:
            result[strategy] = None
    return result


def wire_bytes(size_bytes: int, wire: str) -> int:
    """Bytes on the wire of so many bytes of float32."""
    if wire not in WIRE_BYTES:
        raise ValueError(f"no wire dtype {wire!r}: expected one of {', '.join(WIRE_BYTES)}")
    return size_bytes // WIRE_BYTES["float32"] * WIRE_BYTES[wire]


def described_cluster(
    layout: list[int], link: Link, node_rates: dict[int, tuple[float, float]] | None = None, **properties
) -> Cluster:
    """properties: others of Cluster's."""
    if not layout or min(layout) < 1:
        raise ValueError(f"layout {list(layout)}: expected the ranks of each node, 1 or more")
    rate_in, rate_out = np.full(len(layout), float(link.rate)), np.full(len(layout), float(link.rate))
    for node, (into, out) in (node_rates or {}).items():
        if not 0 <= node < len(layout):
            raise ValueError(f"a rate for node {node}: expected nodes 0 to {len(layout) - 1}")
        rate_in[node], rate_out[node] = into, out
    if not (min(rate_in.min(), rate_out.min()) > 0 and link.latency_s >= 0):
        raise ValueError("expected rates above 0 and a latency of 0 or more")
    placement = np.repeat(np.arange(len(layout)), layout)
    return Cluster(placement, rate_in, rate_out, link.latency_s, nominal=link.nominal, **properties)
