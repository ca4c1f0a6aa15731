"""The exposed part of an exchange that partly overlaps with the step's compute."""

from dataclasses import dataclass

from dist.cost.memory import VECTOR_BYTES
from dist.cost.sparse_rows import Rows

# Backward is two thirds of a step's compute time: it has two matrix products for each one in forward.
BACKWARD = 2 / 3
# The bucket that becomes final last: 4 MiB, or an eighth of a small vector.
BUCKET_BYTES = 4 << 20
LARGEST_BUCKET = 1 / 8


@dataclass(frozen=True)
class Training:
    """The work of a step. compute_s: forward and backward of all microbatches, while all ranks compute; item_bytes: of
    one gradient on the wire; update_s: AdamW over the whole vector on one rank; ranges, micro_steps, own_operation,
    matrices, low_rank: as in dist.cost.messages.Setting. rows: the embedding rows used, if overlap sends them
    separately. local_steps: steps for each exchange of a strategy that takes local steps.
    """

    parameters: int
    compute_s: float
    item_bytes: int = VECTOR_BYTES
    ranges: tuple[int, ...] = ()
    micro_steps: int = 1
    update_s: float = 0.0
    own_operation: bool = False
    rows: Rows | None = None
    matrices: tuple[tuple[int, int, int], ...] | None = None
    low_rank: int = 4
    local_steps: int = 1


@dataclass(frozen=True)
class Overlap:
    """part: fraction of the exchange that may overlap with compute; last: fraction of that part that is always exposed,
    because it becomes final when compute ends; beside: fraction of the compute time that may hide the rest."""

    part: float
    last: float
    beside: float

    def step_s(self, exchange_s: float, compute_s: float) -> float:
        """Return the seconds of compute plus the exposed part of the exchange."""
        early_s = self.part * exchange_s
        last_s = self.last * early_s
        return compute_s + exchange_s - early_s + last_s + max(0.0, early_s - last_s - self.beside * compute_s)


def of_buckets(training: Training, beside: float = BACKWARD) -> Overlap:
    """Return the overlap of buckets. They wait for the last microbatch's backward. The last bucket is exposed; it holds
    the whole embedding, unless embedding rows are exchanged separately."""
    last = min(LARGEST_BUCKET, BUCKET_BYTES / (training.parameters * training.item_bytes))
    if training.rows is None:
        last = max(last, embeddings_share(training))
    return Overlap(1.0, last, beside / training.micro_steps)


def embeddings_share(training: Training) -> float:
    """Return the first range's fraction of the vector: its gradient is final last, its parameters are used first."""
    return training.ranges[0] / training.parameters if training.ranges else 0.0
