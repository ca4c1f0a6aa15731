"""How much of an exchange a step shows when part of it runs beside the step's computing."""

from dataclasses import dataclass

from dist.cost.messages import FLOAT32_BYTES
from dist.cost.sparse_rows import Rows

# Of a step's computing backward is two thirds: two products for each of forward's.
BACKWARD = 2 / 3
# The bucket that becomes final last: 4 MiB, or an eighth of a small vector.
BUCKET_BYTES, LARGEST_BUCKET = 4 << 20, 1 / 8


@dataclass(frozen=True)
class Training:
    """What a step has to do. compute_s: forward and backward of all micro-steps, all ranks at it; item_bytes: of one
    gradient as it travels; update_s: AdamW over the whole vector on one rank; ranges, micro_steps: as
    dist.cost.messages.Setting's, and own_operation. rows: that it looks up, if these are exchanged apart with overlap.
    """

    parameters: int
    compute_s: float
    item_bytes: int = FLOAT32_BYTES
    ranges: tuple[int, ...] = ()
    micro_steps: int = 1
    update_s: float = 0.0
    own_operation: bool = False
    rows: Rows | None = None


@dataclass(frozen=True)
class Overlap:
    """Fractions. part: of the exchange that may run beside computing; last: of that part what always shows, as it
    becomes final when computing ends; beside: of the computing that the others may run beside."""

    part: float
    last: float
    beside: float

    def step_s(self, exchange_s: float, compute_s: float) -> float:
        """Seconds of computing and of what shows of the exchange."""
        early_s = self.part * exchange_s
        last_s = self.last * early_s
        return compute_s + exchange_s - early_s + last_s + max(0.0, early_s - last_s - self.beside * compute_s)


def of_buckets(training: Training, beside: float = BACKWARD) -> Overlap:
    """Buckets wait for the last micro-step's backward, and the last bucket shows: of an embedding that is exchanged as
    a whole, all of it."""
    last = min(LARGEST_BUCKET, BUCKET_BYTES / (training.parameters * training.item_bytes))
    if training.rows is None:
        last = max(last, embeddings_share(training))
    return Overlap(1.0, last, beside / training.micro_steps)


def embeddings_share(training: Training) -> float:
    """The first range's part of the vector: its gradient is final last, and its parameters are used first."""
    return training.ranges[0] / training.parameters if training.ranges else 0.0
