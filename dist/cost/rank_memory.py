"""Bytes a rank holds under each strategy: parameters, gradients and AdamW's two moments, all float32.

In units of one vector of all parameters, N ranks on M nodes, L on the smallest node; of the rank that holds most.
Activations, the landing buffers of segments and what ZeRO gathers for a layer at a time come on top. What a node holds
once, in shared memory, is counted on its leader.
"""

import math
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
    "hierarchical": ("1", "1", "2/L"),
    "hierarchical-sharded": ("1", "1", "2/ML"),
    "zero-2": ("1", "1/N", "2/N"),
    "zero-3": ("1/N", "1/N", "2/N"),
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
    sizes = {"N": ranks, "M": nodes, "L": ranks // nodes}
    total = Fraction(0)
    for term in formula.split(" + "):
        number, _, shared_by = term.partition("/")
        total += Fraction(int(number), math.prod(sizes[letter] for letter in shared_by))
    return total
