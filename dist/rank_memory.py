"""Bytes a rank holds under each strategy: parameters, gradients and AdamW's two moments, all float32.

In units of one vector of all parameters, N ranks on M nodes; of the rank that holds most. Activations, the landing
buffers of segments and what ZeRO gathers for a layer at a time come on top. What a node holds once, in shared memory,
is counted on its leader.
"""

from dataclasses import dataclass
from fractions import Fraction

VECTOR_BYTES = 4  # of one parameter
REPLICATED = ("1", "1", "2")
FORMULAS = {
    "reduce-bcast": REPLICATED,  # the server; the others hold no moments
    "sliced": ("1", "1", "2/N"),
    "reduce-scatter": ("1", "1 + 1/N", "2/N"),
    "allreduce": REPLICATED,
    "ring": REPLICATED,
    "tree": REPLICATED,
    "hierarchical": REPLICATED,
    "hierarchical-sharded": ("1", "1", "2/M"),
    "zero-2": ("1", "1/M", "2/M"),
    "zero-3": ("1/M", "1/M", "2/M"),
}


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the rank that holds most, and the formula of their sum in vectors of all parameters."""

    parameters: int
    gradients: int
    optimizer: int
    formula: str

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def rank_memory(strategy: str, parameters: int, ranks: int, nodes: int) -> RankMemory:
    """KeyError for a strategy without a formula; shares are rounded up to whole parameters."""
    formulas = FORMULAS[strategy]
    amounts = (VECTOR_BYTES * -(-_vectors(formula, ranks, nodes) * parameters // 1) for formula in formulas)
    return RankMemory(*map(int, amounts), formula=" + ".join(formulas))


def _vectors(formula: str, ranks: int, nodes: int) -> Fraction:
    """1 + 1/ranks for "1 + 1/N"."""
    sizes = {"N": ranks, "M": nodes}
    total = Fraction(0)
    for term in formula.split(" + "):
        number, _, shared_by = term.partition("/")
        total += Fraction(int(number), sizes[shared_by] if shared_by else 1)
    return total
