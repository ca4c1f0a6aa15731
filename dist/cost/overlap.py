"""How much of an exchange is exposed when part of it overlaps with the step's computing."""

from dataclasses import dataclass

from dist.cost.memory import VECTOR_BYTES
from dist.cost.sparse_rows import Rows

# Backward is two thirds of a step's computing: two matrix products for each one of forward.
BACKWARD = 2 / 3
# The bucket that becomes final last: 4 MiB, or an eighth of a small vector.
BUCKET_BYTES = 4 << 20
LARGEST_BUCKET = 1 / 8


@dataclass(frozen=True)
class Training:
    """The work of a step. compute_s: forward and backward of all microbatches, while all ranks compute; item_bytes: of
    one gradient as it travels; update_s: AdamW over the whole vector on one rank; ranges, micro_steps, own_operation:
    as dist.cost.messages.Setting's. rows: the rows that it uses, if they are exchanged apart with overlap.
    """

    parameters: int
    compute_s: float
    item_bytes: int = VECTOR_BYTES
    ranges: tuple[int, ...] = ()
    micro_steps: int = 1
    update_s: float = 0.0
    own_operation: bool = False
    rows: Rows | None = None


@dataclass(frozen=True)
class Overlap:
    """Fractions. part: of the exchange that may overlap with computing; last: of that part that is always exposed, as
    it becomes final when computing ends; beside: of the computing that the rest may overlap with."""

    part: float
    last: float
    beside: float

    def step_s(self, exchange_s: float, compute_s: float) -> float:
        """Return the seconds of computing and of the exposed part of the exchange."""
        early_s = self.part * exchange_s
        last_s = self.last * early_s
        return compute_s + exchange_s - early_s + last_s + max(0.0, early_s - last_s - self.beside * compute_s)


def of_buckets(training: Training, beside: float = BACKWARD) -> Overlap:
    """Return the overlap of buckets. They wait for the last microbatch's backward, and the last one is exposed: it
    holds all of an embedding that is exchanged whole."""
    last = min(LARGEST_BUCKET, BUCKET_BYTES / (training.parameters * training.item_bytes))
    if training.rows is None:
        last = max(last, embeddings_share(training))
    return Overlap(1.0, last, beside / training.micro_steps)


def embeddings_share(training: Training) -> float:
    """Return the first range's part of the vector: its gradient is final last, its parameters are used first."""
    return training.ranges[0] / training.parameters if training.ranges else 0.0
