"""The algorithms that MPICH 5.0 and Open MPI 5.0 pick by default for a collective of a vector of 1 MB or more.

Smaller vectors are assumed to use the same algorithms. Site settings and other builds may pick others. The counters of
every port confirmed the choices under MPICH 5.0.2 and Open MPI 5.0.11, both over UCX and TCP: vectors of 8 MB on 3, 4
and 5 virtual hosts with 1 rank each, or 2 (but 1 on the fifth). For other numbers of ranks the choices come from:

    MPICH       src/mpi/coll/coll_selection.json, maint/tuning/coll/ch4/generic.json
    Open MPI    ompi/mca/coll/tuned/coll_tuned_decision_fixed.c, coll/libnbc for nonblocking calls, coll/han
"""

from dataclasses import replace

from dist.cost import mpi_algorithms as algorithms
from dist.cost.mpi_algorithms import MpiCall
from dist.cost.stages import Stage, backwards
from dist.probe.programs import OPEN_MPI, mpi_family


class UnknownChoice(ValueError):
    """The library's algorithm for a call is not known, or not modelled."""


def mpich_choice(call: MpiCall) -> str:
    if call.collective == "reduce_scatter_block":
        return "pairwise"
    if call.collective == "allgather":
        return "ring"
    if call.shares_nodes and (call.collective != "bcast" or call.count < 8):
        return "smp"
    if call.collective in ("bcast", "ibcast"):
        if call.count < 8:
            return "binomial"
        return "scatter-doubling" if call.power_of_two and call.size < 1 << 19 else "scatter-ring"
    if call.built_in:
        return "rabenseifner"
    return "doubling" if call.collective == "allreduce" else "binomial"


# Open MPI's choices between ranks on different nodes: {collective: [(for fewer ranks than this, algorithm), ...]}.
FLAT = {
    "reduce": [(4, "chain"), (8, "linear"), (float("inf"), "binomial")],
    "bcast": [(4, "linear"), (8, "chain"), (16, "linear")],
    "ireduce": [(3, "chain"), (float("inf"), "rabenseifner")],
    "ibcast": [(5, "linear"), (float("inf"), "doubling")],
    "allgather": [(32, "bruck"), (128, "ring")],
}
# Its reduce-scatter is a reduce and a scatter for [(fewer ranks than this, least bytes of a block, most)].
REDUCED_AND_SCATTERED = [(4, 0, 1 << 40), (8, 1 << 20, 1 << 40), (16, 1 << 19, 1 << 22), (32, 1 << 19, 1 << 21)]


def openmpi_choice(call: MpiCall) -> str | None:
    """Return the algorithm; None if it is not modelled."""
    if call.collective == "allreduce":
        return "han" if call.shares_nodes else "rabenseifner"
    if call.collective == "reduce_scatter_block":
        sizes = next((sizes for below, *sizes in REDUCED_AND_SCATTERED if call.count < below), (0, 0))
        return "reduce-scatter" if sizes[0] <= call.block < sizes[1] else None
    if call.collective in ("reduce", "bcast", "allgather") and call.nodes_alike:
        return "han"
    if call.collective == "allgather" and call.power_of_two and call.count < 32:
        return "doubling"
    if call.collective == "bcast" and 16 <= call.count < 32 and call.size < 1 << 20:
        return "binomial"
    return next((algorithm for below, algorithm in FLAT[call.collective] if call.count < below), None)


CHOICES = {"mpich": mpich_choice, "openmpi": openmpi_choice}
LIBRARIES = tuple(CHOICES)


def library_key(name: str) -> str:
    """Map a library's name to its key in LIBRARIES: "openmpi" for "Open MPI v5.0.11", "mpich" for all others."""
    return "openmpi" if mpi_family(name) == OPEN_MPI else "mpich"


def resolve(call: MpiCall) -> tuple[list[Stage], list[str]]:
    """Return (the call's stages, the names of its algorithms). UnknownChoice if these are not known."""
    algorithm = CHOICES[call.library](call)
    name = f"{call.collective} {algorithm}"
    if algorithm is None:
        raise UnknownChoice(
            f"{call.library}'s {call.collective} of {call.size} bytes on {call.count} ranks is not modelled"
        )
    if algorithm == "smp":
        stages, names = algorithms.smp(call, resolve)
        return stages, [name, *names]
    if algorithm == "reduce-scatter":
        stages, names = resolve(replace(call, collective="reduce"))
        return stages + algorithms.linear_scatter(call), [name, *names]
    return ALGORITHMS[name.removeprefix("i")](call), [name]  # nonblocking calls use the same algorithms


ALGORITHMS = {
    "reduce linear": algorithms.linear_reduce,
    "reduce chain": algorithms.chain_reduce,
    "reduce binomial": algorithms.binomial_reduce,
    "reduce rabenseifner": algorithms.rabenseifner_reduce,
    "reduce han": algorithms.han,
    "bcast linear": algorithms.linear_bcast,
    "bcast chain": lambda call: backwards(algorithms.chain_reduce(call)),
    "bcast binomial": lambda call: backwards(algorithms.binomial_reduce(call)),
    "bcast doubling": algorithms.doubling_bcast,
    "bcast scatter-ring": lambda call: algorithms.scattered_bcast(call, algorithms.ring_all_gather),
    "bcast scatter-doubling": lambda call: algorithms.scattered_bcast(call, algorithms.doubling_all_gather),
    "bcast han": algorithms.han,
    "allreduce doubling": algorithms.doubling_allreduce,
    "allreduce rabenseifner": algorithms.rabenseifner_allreduce,
    "allreduce han": algorithms.han,
    "reduce_scatter_block pairwise": algorithms.pairwise_reduce_scatter,
    "allgather ring": algorithms.ring_all_gather,
    "allgather doubling": algorithms.doubling_all_gather,
    "allgather bruck": algorithms.bruck_all_gather,
    "allgather han": algorithms.han_all_gather,
}
