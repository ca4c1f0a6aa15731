"""Bytes that a rank holds under a strategy: parameters, gradients and AdamW's two moments, all float32.

A strategy declares them as formulas in units of one vector of all parameters, for N ranks on M nodes, with L ranks on
the smallest node. The formulas describe the rank that holds most. They omit activations, receive buffers for segments,
and parameters gathered for a layer at a time.
"""

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

VECTOR_BYTES = 4  # bytes of one parameter
TERM = re.compile(r"(\d+|N|M|L)(?:/(\d*)([NML]+))?")  # one term of a formula


@dataclass(frozen=True)
class Memory:
    """parameters, gradients, optimizer: formulas such as "1 + 1/N". overlapped: the optimizer formula with --overlap,
    if it differs. shared_in_node: the ranks of a node share one copy of the parameters, counted on the leader.
    on_server: rank 0 alone holds the optimizer's moments. ValueError for a malformed formula."""

    parameters: str = "1"
    gradients: str = "1"
    optimizer: str = "2"
    overlapped: str = ""
    shared_in_node: bool = False
    on_server: bool = False

    def __post_init__(self):
        for formula in (*self.formulas(False), *self.formulas(True)):
            if not all(TERM.fullmatch(term) for term in formula.split(" + ")):
                raise ValueError(
                    f"no formula of a rank's memory: {formula!r}; expected terms such as 2, N, 1/N or 2/3NL with ' + ' "
                    "between them (N ranks, M nodes, L ranks of a node)"
                )

    def formulas(self, overlap: bool) -> tuple[str, str, str]:
        return self.parameters, self.gradients, (overlap and self.overlapped) or self.optimizer

    def with_errors(self) -> "Memory":
        """Return the memory with error feedback. Ranks that share parameters also share out the rounding errors."""
        return replace(self, gradients=f"{self.gradients} + {'1/L' if self.shared_in_node else '1'}")

    def of_rank(self, parameters: int, ranks: int, nodes: int, overlap: bool = False) -> "RankMemory":
        """Return the bytes of the rank that holds most; shares are rounded up to whole parameters."""
        formulas = self.formulas(overlap)
        amounts = (VECTOR_BYTES * -(-_vectors(formula, ranks, nodes) * parameters // 1) for formula in formulas)
        return RankMemory(*map(int, amounts), formula=" + ".join(formulas))

    def of_node(self, parameters: int, members: int, ranks: int, nodes: int, overlap: bool = False) -> int:
        """Return the most bytes that `members` ranks of a node hold together."""
        held = self.of_rank(parameters, ranks, nodes, overlap)
        copies = 1 if self.shared_in_node else members
        optimizers = 1 if self.on_server else members
        return held.parameters * copies + held.gradients * members + held.optimizer * optimizers


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

    def updated_share(self, parameters: int) -> float:
        """Return the fraction of the vector that this rank updates: it holds the two moments of that fraction."""
        return self.optimizer / (2 * VECTOR_BYTES * parameters)


def _vectors(formula: str, ranks: int, nodes: int) -> Fraction:
    """Evaluate a formula: "1 + 1/N" is 1 + 1/ranks."""
    sizes = {"N": ranks, "M": nodes, "L": ranks // nodes}
    total = Fraction(0)
    for term in formula.split(" + "):
        number, divisor, sharers = TERM.fullmatch(term).groups()
        divided_by = int(divisor or 1) * math.prod(sizes[letter] for letter in sharers or "")
        total += Fraction(sizes.get(number) or int(number), divided_by)
    return total
