"""How gradients become updated parameters on every rank, from the simplest to the fastest.

    D is the bytes of one gradient vector, N the ranks, M the nodes.

    name                  calls                                  optimizer state    through the busiest node's port
    none                  -                                      all, on each rank  0 (a control: N models)
    reduce-bcast          Reduce, Bcast                          all, on rank 0     every gradient in, parameters out
    sliced                N Reduces, N Bcasts, each other roots  1/N                the same, spread over all nodes
    reduce-scatter        Reduce_scatter_block, Allgather        1/N                2 (N-1)/N D for each of its ranks
    allreduce             Allreduce                              all, on each rank  the library's choice
    ring                  a ring of all ranks                    all, on each rank  2 (N-1)/N D in and out
    tree                  two binary trees of all ranks          all, on each rank  2 D in and out for each rank
    hierarchical          sum in the node, a ring of nodes       1/ranks of a node  2 (M-1)/M D in and out: the bound
    hierarchical-sharded  the same, update between its halves    1/N                the same
    zero-2                rings, layer by layer                  1/N, gradients too as ring
    zero-3                the same, gathered for each use        1/N, all of it     as ring, and half as much again

To write your own: a file with a subclass of Strategy (base.py) and a line below; the tests run it too.
"""

from gpt2.errors import UserError
from strategies.allreduce import Allreduce
from strategies.base import Job, Strategy
from strategies.bucketed import Bucketed
from strategies.hierarchical import Hierarchical
from strategies.hierarchical_sharded import HierarchicalSharded
from strategies.none import NoExchange
from strategies.reduce_bcast import ReduceBcast
from strategies.reduce_scatter import ReduceScatter
from strategies.ring import Ring
from strategies.sliced import Sliced
from strategies.tree import Tree
from strategies.zero_2 import Zero2
from strategies.zero_3 import Zero3

__all__ = [
    "DEVICE_TRANSPORTS",
    "OWN_EXCHANGES",
    "SERVERS",
    "STRATEGIES",
    "TRANSPORTS",
    "WIRES",
    "Job",
    "Strategy",
    "check_exchange",
    "check_strategy",
    "check_transport",
    "check_wire",
    "exchanges_on_device",
    "worker_count",
]

STRATEGIES = {
    "none": NoExchange,
    "reduce-bcast": ReduceBcast,
    "sliced": Sliced,
    "reduce-scatter": ReduceScatter,
    "allreduce": Allreduce,
    "ring": Ring,
    "tree": Tree,
    "hierarchical": Hierarchical,
    "hierarchical-sharded": HierarchicalSharded,
    "zero-2": Zero2,
    "zero-3": Zero3,
}
OWN_EXCHANGES = (Bucketed, Zero2)  # with what derives from them: messages of our own, which --wire and --overlap shape

SERVERS = ("colocated", "dedicated")
WIRES = ("float32", "bfloat16")
TRANSPORTS = ("host", "gpu-aware", "nccl")
DEVICE_TRANSPORTS = ("gpu-aware", "nccl")  # between arrays on GPUs


def worker_count(server: str, ranks: int) -> int:
    """How many of the ranks compute gradients."""
    return ranks - 1 if server == "dedicated" else ranks


def check_strategy(name: str, server: str, ranks: int, no_exchange: bool) -> None:
    """UserError if this strategy cannot run so, or if `none` was not asked for twice."""
    if server == "dedicated" and name != "reduce-bcast":
        raise UserError(f"--server dedicated with --strategy {name}, which has no server: use --strategy reduce-bcast")
    if server == "dedicated" and ranks < 2:
        raise UserError(f"--server dedicated on {ranks} rank, expected at least 2: one serves, the others compute")
    if (name == "none") != no_exchange:
        raise UserError(
            "--strategy none exchanges nothing, so every rank trains a model of its own: a control for timings, not a "
            "way to train; to run it say both, --strategy none --no-exchange"
        )


def check_exchange(name: str, wire: str, error_feedback: bool, overlap: bool) -> None:
    """UserError where a flag of our own exchanges meets a strategy that calls MPI's."""
    own = [other for other, kind in STRATEGIES.items() if issubclass(kind, OWN_EXCHANGES)]
    asked = {"--wire bfloat16": wire == "bfloat16", "--overlap": overlap}
    for flag in [flag for flag, given in asked.items() if given and name not in own]:
        raise UserError(f"{flag} with --strategy {name}, whose messages are MPI's: use {', '.join(own)}")
    check_wire(wire, error_feedback)
    if error_feedback and issubclass(STRATEGIES[name], Zero2):
        raise UserError(
            f"--error-feedback with --strategy {name}: what rounding loses is as large as the gradients, which no rank "
            "is to hold: leave it out, or use hierarchical-sharded"
        )


def exchanges_on_device(name: str) -> bool:
    """Whether its exchange can stay on GPUs: its messages are MPI's collectives, which others offer there, too."""
    return not issubclass(STRATEGIES[name], OWN_EXCHANGES)


def check_transport(name: str, transport: str) -> None:
    """UserError where an exchange that starts in host memory is asked to stay on the GPUs."""
    if transport in DEVICE_TRANSPORTS and not exchanges_on_device(name):
        others = ", ".join(other for other in STRATEGIES if exchanges_on_device(other) and other != "none")
        raise UserError(
            f"--transport {transport} with --strategy {name}, which sends messages of its own from host memory: use "
            f"--transport host, or one of {others}"
        )


def check_wire(wire: str, error_feedback: bool) -> None:
    """UserError where there is nothing to feed back, whatever the strategy."""
    if error_feedback and wire != "bfloat16":
        raise UserError(f"--error-feedback with --wire {wire}, which loses nothing: add --wire bfloat16")
