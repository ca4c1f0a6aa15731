"""What a rule hands back: a bottleneck, how much of a step it costs, and how it was seen."""

from dataclasses import dataclass, field

KINDS = (
    "network-congestion", "server-hotspot", "slow-link", "straggler", "imbalance", "data", "compute-bound",
    "latency-bound", "none",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """kind: one of KINDS; seconds: of a median step, that this takes; sentence: for a reader who can act on it.

    node, rank: whose it is, None for nobody's; direction: of the node's port, "in", "out", None for both or neither.
    facts: the numbers behind the sentence, with units in their names.
    """

    kind: str
    seconds: float
    sentence: str
    phase: str | None = None
    node: int | None = None
    rank: int | None = None
    direction: str | None = None
    facts: dict = field(default_factory=dict)


def count_text(number: int, noun: str) -> str:
    """ "1 node", "5 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def bytes_text(amount: float) -> str:
    """ "27 MB", "1.2 GB", "340 kB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}" if amount < 1000 * size else f"{amount / size:.0f} {unit}"
    return f"{amount:.0f} bytes"


def seconds_text(seconds: float) -> str:
    """ "0.95 s", "120 ms", "0.4 ms"."""
    if seconds >= 0.5:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
