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

To write your own: a file with a subclass of Strategy (base.py) and a line below; the tests run it too. What each is
where its arrays are on GPUs, and what it exchanges them by there: the table in on_gpus.py.
"""

from gpt2.errors import UserError
from strategies.allreduce import Allreduce
from strategies.base import Job, Strategy
from strategies.bucketed import Bucketed
from strategies.hierarchical import Hierarchical
from strategies.hierarchical_sharded import HierarchicalSharded
from strategies.none import NoExchange
from strategies.on_gpus import DEVICE_FORMS
from strategies.reduce_bcast import ReduceBcast
from strategies.reduce_scatter import ReduceScatter
from strategies.ring import Ring
from strategies.sliced import Sliced
from strategies.tree import Tree
from strategies.zero_2 import Zero2
from strategies.zero_3 import Zero3

__all__ = [
    "DEVICE_FORMS",
    "DEVICE_TRANSPORTS",
    "OVERLAP_NEEDS_NCCL",
    "OWN_EXCHANGES",
    "SERVERS",
    "STRATEGIES",
    "TRANSPORTS",
    "WIRES",
    "Job",
    "Strategy",
    "check_exchange",
    "check_rounding",
    "check_strategy",
    "check_transport",
    "check_wire",
    "device_transports",
    "no_overlap",
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
OVERLAP_NEEDS_NCCL = tuple(  # as in host memory their calls are MPI's
    name for name, form in DEVICE_FORMS.items() if form.exchanges and not issubclass(STRATEGIES[name], OWN_EXCHANGES)
)

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
    if wire == "bfloat16" and name not in own:
        raise UserError(f"--wire bfloat16 with --strategy {name}, whose messages are MPI's: use {', '.join(own)}")
    if overlap and name not in (*own, *OVERLAP_NEEDS_NCCL):
        raise UserError(
            f"--overlap with --strategy {name}, whose messages are MPI's: use {', '.join(own)}, or over NCCL "
            f"{', '.join(OVERLAP_NEEDS_NCCL)}"
        )
    check_wire(wire, error_feedback)
    if error_feedback and issubclass(STRATEGIES[name], Zero2):
        raise UserError(
            f"--error-feedback with --strategy {name}: what rounding loses is as large as the gradients, which no rank "
            "is to hold: leave it out, or use hierarchical-sharded"
        )


def device_transports(name: str, wire: str, overlap: bool) -> tuple[str, ...]:
    """Those on which its exchange can stay on GPUs. Only NCCL's calls are queued, and go on while the GPU computes."""
    form = DEVICE_FORMS.get(name)
    if form is None or ((overlap or wire != "float32") and wire not in form.exchanges):
        return ()
    return ("nccl",) if overlap else DEVICE_TRANSPORTS


def check_transport(name: str, transport: str, wire: str, overlap: bool) -> None:
    """UserError where an exchange that starts in host memory is asked to stay on the GPUs, or the other way round."""
    if transport == "host" and overlap and name in OVERLAP_NEEDS_NCCL:
        raise no_overlap(name, "with --transport host")
    if transport not in DEVICE_TRANSPORTS or transport in device_transports(name, wire, overlap):
        return
    if name not in DEVICE_FORMS:
        raise UserError(
            f"--transport {transport} with --strategy {name}, which has no line in the table of strategies/on_gpus.py: "
            f"use --transport host, or one of {', '.join(other for other in DEVICE_FORMS if other != 'none')}"
        )
    raise UserError(f"--transport {transport} with --overlap, whose calls return when all is done: use nccl, or host")


def no_overlap(name: str, why: str) -> UserError:
    """What there is to say where the calls of a strategy are MPI's, though they were to go on during backward."""
    own = ", ".join(other for other, kind in STRATEGIES.items() if issubclass(kind, OWN_EXCHANGES))
    return UserError(
        f"--overlap with --strategy {name} {why}: its calls go on during backward over NCCL alone: use --transport "
        f"nccl, or one of {own}"
    )


def check_rounding(name: str, wire: str) -> None:
    """UserError where parameters that are to be rounded at random come over the wire rounded to nearest already."""
    if wire == "bfloat16" and STRATEGIES.get(name) not in (Ring, Tree, Hierarchical):
        raise UserError(
            f"--stochastic-rounding with --wire bfloat16 and --strategy {name}, which gathers parameters rounded to "
            "nearest: leave one of them out"
        )


def check_wire(wire: str, error_feedback: bool) -> None:
    """UserError where there is nothing to feed back, whatever the strategy."""
    if error_feedback and wire != "bfloat16":
        raise UserError(f"--error-feedback with --wire {wire}, which loses nothing: add --wire bfloat16")
