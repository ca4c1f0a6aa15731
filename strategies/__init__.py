"""How gradients become updated parameters on every rank, from the simplest to the fastest.

    D is the bytes of one gradient vector, N the ranks.

    name            calls                                   optimizer state    through the busiest node, one rank a node
    none            -                                       all, on each rank  0 (a control: N models)
    reduce-bcast    Reduce, Bcast                           all, on rank 0     every gradient in, every parameter out
    sliced          N Reduces, N Bcasts, each other roots   1/N                the same bytes, spread over all nodes
    reduce-scatter  Reduce_scatter_block, Allgather         1/N                2 (N-1)/N D in and out
    allreduce       Allreduce                               all, on each rank  2 (N-1)/N D in and out, at best

To write your own: a file with a subclass of Strategy (base.py) and a line below; the tests run it too.
"""

from gpt2.errors import UserError
from strategies.allreduce import Allreduce
from strategies.base import Job, Strategy
from strategies.none import NoExchange
from strategies.reduce_bcast import ReduceBcast
from strategies.reduce_scatter import ReduceScatter
from strategies.sliced import Sliced

__all__ = ["SERVERS", "STRATEGIES", "Job", "Strategy", "check_strategy", "worker_count"]

STRATEGIES = {
    "none": NoExchange,
    "reduce-bcast": ReduceBcast,
    "sliced": Sliced,
    "reduce-scatter": ReduceScatter,
    "allreduce": Allreduce,
}

SERVERS = ("colocated", "dedicated")


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
