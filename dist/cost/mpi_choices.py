"""The algorithms MPI libraries pick for collectives: the defaults of MPICH 5.0 and Open MPI 5.0.

CHOICES is the table. For a library and a collective, the first line whose condition holds applies. Each line cites its
place in the library's sources. Algorithm None: a choice that is not modelled. A site's settings and other builds may
choose otherwise.

The counters of every port confirmed the lines marked `counted`, under MPICH 5.0.2 or Open MPI 5.0.11, both over UCX and
TCP: vectors of 8 MB on 3, 4 and 5 virtual hosts, with 1 rank each and with 2 (the fifth host 1).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dist.cost import mpi_algorithms as flat
from dist.cost import mpi_compositions as composed
from dist.cost.mpi_calls import MpiCall
from dist.cost.rabenseifner import rabenseifner_allreduce, rabenseifner_reduce
from dist.cost.stages import Stage, backwards
from dist.probe.programs import OPEN_MPI, mpi_family

MPICH = "src/mpi/coll/coll_selection.json"
CH4 = "maint/tuning/coll/ch4/generic.json"
TUNED = "ompi/mca/coll/tuned/coll_tuned_decision_fixed.c"
NBC = "ompi/mca/coll/libnbc"
HAN = "ompi/mca/coll/han (priority 35, tuned's is 30)"


class UnknownChoice(ValueError):
    """The library's algorithm for a call is not known, or not modelled."""


@dataclass(frozen=True)
class Option:
    """A line of the table."""

    condition: Callable[[MpiCall], bool]
    algorithm: str | None
    source: str  # file of the library that says so
    counted: bool = False  # confirmed by the ports' counters


def otherwise(call: MpiCall) -> bool:
    return True


CHOICES = {
    ("mpich", "reduce"): [
        Option(lambda call: call.shares_nodes and call.size > 2048, "smp", CH4, counted=True),
        Option(lambda call: call.shares_nodes, None, CH4),  # its composition beta
        Option(lambda call: call.size <= 2048 or call.few_elements or not call.built_in, "binomial", MPICH),
        Option(otherwise, "rabenseifner", MPICH, counted=True),
    ],
    ("mpich", "ireduce"): [
        Option(lambda call: call.shares_nodes, "smp", MPICH, counted=True),
        Option(lambda call: call.size <= 2048 or call.few_elements or not call.built_in, "binomial", MPICH),
        Option(otherwise, "rabenseifner", MPICH),
    ],
    ("mpich", "ibcast"): [
        Option(lambda call: call.shares_nodes, "smp", MPICH, counted=True),
        Option(lambda call: call.count < 8 or call.size < 12288, "binomial", MPICH),
        Option(lambda call: call.power_of_two and call.size < 524288, "scatter-doubling", MPICH),
        Option(otherwise, "scatter-ring", MPICH),
    ],
    ("mpich", "bcast"): [
        Option(lambda call: call.shares_nodes and call.count < 8, "smp", CH4, counted=True),
        Option(lambda call: call.shares_nodes and call.size < 12288, "smp", CH4),
        Option(lambda call: call.shares_nodes and call.power_of_two and call.size < 524288, "smp", CH4),
        Option(lambda call: call.count < 8, "binomial", MPICH, counted=True),
        Option(lambda call: call.size <= 12288, "binomial", MPICH),
        Option(lambda call: call.power_of_two and call.size <= 524288, "scatter-doubling", MPICH),
        Option(otherwise, "scatter-ring", MPICH, counted=True),
    ],
    ("mpich", "allreduce"): [
        # The source uses leaders only up to 32 KiB, but the counters show that 5.0.2 also does at 8 MB.
        Option(lambda call: call.shares_nodes, "smp", CH4, counted=True),
        Option(lambda call: call.size <= 8 or call.few_elements or not call.built_in, "doubling", MPICH),
        Option(otherwise, "rabenseifner", MPICH, counted=True),
    ],
    ("mpich", "reduce_scatter_block"): [
        Option(lambda call: call.size >= 524288, "pairwise", MPICH, counted=True),
        Option(otherwise, None, MPICH),  # recursive halving of uneven blocks
    ],
    ("mpich", "allgather"): [
        Option(lambda call: call.power_of_two and call.size < 524288, "doubling", MPICH),
        Option(lambda call: call.size < 81920, "bruck", MPICH),
        Option(otherwise, "ring", MPICH, counted=True),
    ],
    ("openmpi", "reduce"): [
        Option(lambda call: call.nodes_alike, "han", HAN, counted=True),
        Option(lambda call: call.count < 4 and call.size >= 1 << 20, "chain", TUNED, counted=True),
        Option(lambda call: 4 <= call.count < 8 and call.size >= 1 << 20, "linear", TUNED, counted=True),
        Option(lambda call: 4 <= call.count < 8 and call.size >= 1 << 19, "binomial", TUNED),
        Option(lambda call: 8 <= call.count < 512 and call.size >= 16384, "binomial", TUNED, counted=True),
        Option(lambda call: call.count >= 512 and call.size >= 16384, "binomial", TUNED),
        Option(otherwise, None, TUNED),
    ],
    ("openmpi", "bcast"): [
        Option(lambda call: call.nodes_alike, "han", HAN, counted=True),
        # A binary tree: with 3 members, the root and two children.
        Option(lambda call: call.count < 4 and call.size >= 1 << 20, "linear", TUNED, counted=True),
        Option(lambda call: 4 <= call.count < 8 and call.size >= 1 << 20, "chain", TUNED, counted=True),
        Option(lambda call: 4 <= call.count < 8 and call.size >= 8192, "linear", TUNED),
        Option(lambda call: 8 <= call.count < 16 and call.size >= 32768, "linear", TUNED, counted=True),
        Option(lambda call: 16 <= call.count < 32 and 4096 <= call.size < 1 << 20, "binomial", TUNED),
        Option(otherwise, None, TUNED),  # k-nomial and binary trees, scatter and recursive doubling
    ],
    ("openmpi", "ireduce"): [
        Option(lambda call: call.count > 2 and not call.few_elements, "rabenseifner", NBC),
        Option(lambda call: call.count > 4 or call.size < 65536, "binomial", NBC),
        Option(otherwise, "chain", NBC),
    ],
    ("openmpi", "ibcast"): [
        Option(lambda call: call.count <= 4, "linear", NBC),
        Option(otherwise, "doubling", NBC),
    ],
    ("openmpi", "allreduce"): [
        Option(lambda call: call.shares_nodes, "han", HAN, counted=True),
        Option(lambda call: call.size >= 262144, "rabenseifner", TUNED, counted=True),
        Option(otherwise, None, TUNED),
    ],
    ("openmpi", "reduce_scatter_block"): [
        Option(lambda call: call.count < 4 and call.block >= 1 << 17, "reduce-scatter", TUNED, counted=True),
        Option(lambda call: 4 <= call.count < 8 and call.block >= 1 << 20, "reduce-scatter", TUNED, counted=True),
        Option(lambda call: 8 <= call.count < 16 and 1 << 19 <= call.block < 1 << 22, "reduce-scatter", TUNED, True),
        Option(lambda call: 16 <= call.count < 32 and 1 << 19 <= call.block < 1 << 21, "reduce-scatter", TUNED),
        Option(lambda call: call.count >= 32 and 1 << 16 <= call.block < 1 << 18, "reduce-scatter", TUNED),
        Option(otherwise, None, TUNED),  # butterfly, recursive halving
    ],
    ("openmpi", "allgather"): [
        Option(lambda call: call.nodes_alike, "han", HAN, counted=True),
        Option(lambda call: call.count < 32 and call.power_of_two, "doubling", TUNED, counted=True),
        Option(lambda call: call.count < 32, "bruck", TUNED, counted=True),
        Option(lambda call: call.count < 128 and call.block >= 1 << 16, "ring", TUNED),
        Option(otherwise, None, TUNED),  # ring or neighbour exchange, by size in many steps
    ],
}
LIBRARIES = ("mpich", "openmpi")


def library_key(name: str) -> str:
    """Return the key in LIBRARIES of a library's own name: "openmpi" for "Open MPI v5.0.11", "mpich" for all others."""
    return "openmpi" if mpi_family(name) == OPEN_MPI else "mpich"


def resolve(call: MpiCall) -> tuple[list[Stage], list[str]]:
    """Return (the call's stages, the names of its algorithms). UnknownChoice if the library's choice is not known."""
    choice = next(choice for choice in CHOICES[call.library, call.collective] if choice.condition(call))
    name = f"{call.collective} {choice.algorithm}"
    if choice.algorithm is None:
        raise UnknownChoice(
            f"{call.library}'s {call.collective} of {call.size} bytes on {call.count} ranks is not modelled "
            f"({choice.source})"
        )
    if choice.algorithm == "smp":
        stages, names = composed.smp(call, resolve)
        return stages, [name, *names]
    if choice.algorithm == "reduce-scatter":
        stages, names = resolve(replace(call, collective="reduce"))
        return stages + flat.linear_scatter(call), [name, *names]
    return ALGORITHMS[name.removeprefix("i")](call), [name]  # nonblocking calls use the same


ALGORITHMS = {
    "reduce linear": flat.linear_reduce,
    "reduce chain": flat.chain_reduce,
    "reduce binomial": flat.binomial_reduce,
    "reduce rabenseifner": rabenseifner_reduce,
    "reduce han": composed.han,
    "bcast linear": flat.linear_bcast,
    "bcast chain": lambda call: backwards(flat.chain_reduce(call)),
    "bcast binomial": lambda call: backwards(flat.binomial_reduce(call)),
    "bcast doubling": flat.doubling_bcast,
    "bcast scatter-ring": lambda call: flat.scattered_bcast(call, flat.ring_rounds),
    "bcast scatter-doubling": lambda call: flat.scattered_bcast(call, flat.doubling_all_gather),
    "bcast han": composed.han,
    "allreduce doubling": flat.doubling_allreduce,
    "allreduce rabenseifner": rabenseifner_allreduce,
    "allreduce han": composed.han,
    "reduce_scatter_block pairwise": flat.pairwise_reduce_scatter,
    "allgather ring": lambda call: flat.ring_rounds(call.members, call.blocks),
    "allgather doubling": lambda call: flat.doubling_all_gather(call.members, call.blocks, call.library),
    "allgather bruck": flat.bruck_all_gather,
    "allgather han": composed.han,
}
