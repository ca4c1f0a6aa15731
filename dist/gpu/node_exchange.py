"""Hierarchical exchange between GPUs: sums within each node, rings of messages between the nodes.

    reduce_scatter  within the node, to one rank per rail; then around the ring of each rail
    all_gather      around the ring of each rail; then within the node

There are as many rails as the smallest node has ranks; ranks without a rail own nothing and receive everything. A rank
owns the part of its rail that the ring leaves on its node. A node's port carries 2 (M-1)/M of the vector each way, for
M nodes: the lower bound (strategies/hierarchical.py). Only messages between nodes are rounded.
"""

from dist.gpu.collectives import DeviceCollectives
from dist.gpu.comm import DeviceComm
from dist.gpu.device_ring import DeviceRing
from dist.mpi import MPI
from dist.wire import WireFormat


class NodeExchange:
    """An exchange (exchange.py). Collective calls come before allocations, which may fail on one rank."""

    def __init__(self, comm: DeviceComm, ranges, wire_format: WireFormat):
        in_node = comm.split_by_node()
        rails = comm.allreduce(in_node.size, MPI.MIN)
        between = comm.Split(in_node.rank if in_node.rank < rails else MPI.UNDEFINED, comm.rank)
        self._in_node = DeviceCollectives(in_node, ranges, owners=rails)
        parts = [self._in_node.own_part(*part) for part in ranges]
        self._between = None if between is None else DeviceRing(between, parts, wire_format)

    def own_part(self, start: int, stop: int) -> tuple[int, int]:
        of_rail = self._in_node.own_part(start, stop)
        return of_rail if self._between is None else self._between.own_part(*of_rail)

    def allreduce(self, flat, errors=None) -> None:
        self.reduce_scatter(flat, errors)
        self.all_gather(flat, errors)

    def reduce_scatter(self, flat, errors=None) -> None:
        self._in_node.reduce_scatter(flat)
        if self._between is not None:
            self._between.reduce_scatter(*self._of_rail(flat, errors))

    def all_gather(self, flat, errors=None) -> None:
        if self._between is not None:
            self._between.all_gather(*self._of_rail(flat, errors))
        self._in_node.all_gather(flat)

    def _of_rail(self, flat, errors):
        part = slice(*self._in_node.own_part(0, len(flat)))
        return flat[part], None if errors is None else errors[part]
