"""The interface of strategies: a strategy gets a Job and defines `update`, and if necessary hooks and `state`."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from dist.buffers import NodeBuffers, OwnBuffers
from dist.gpu.buffers import OnDevice
from dist.host.exchange import RingExchange
from dist.sparse_gradient import SparseGradient
from dist.world import World
from gpt2.optimizer import AdamW, Clipping
from strategies.traits import Traits


@dataclass(frozen=True)
class OuterSteps:
    """The settings of diloco: each replica makes local_steps steps, then their mean change is the gradient of an outer
    Nesterov step with `lr` and `momentum`. replica: "node" or "rank", the ranks that train one replica. fragments: the
    parts of the parameters that travel one after another while training continues."""

    local_steps: int = 50
    lr: float = 0.7
    momentum: float = 0.9
    replica: str = "node"
    fragments: int = 1


@dataclass(frozen=True)
class Job:
    """The data and tools that a strategy gets.

    world           this rank's place; collectives of `world.comm` take arrays in host memory, or arrays on GPUs
    buffers         flat float32 `parameters` (initialized) and `gradients`, (size,) each; size is a multiple of the
                    number of ranks. Depending on `traits.buffers` they are shared, sharded or on a GPU
    new_optimizer   (start, stop): an AdamW that holds state for that range only
    sum_of_squares  (flat): the sum of squares of a flat array, a float
    clipping        turns the sum of squares into the norm and the factor for AdamW
    tracer          tracer.phase(name, bytes=, root=) times the block inside
    server          "colocated" or "dedicated", for a strategy with a server
    new_exchange    (comm, ranges): exchanges ranges of vectors (dist/host/exchange.py, dist/gpu/exchange.py)
    final_ranges    ranges of the flat buffer in the order in which backward finishes them
    bucket_bytes    exchange during backward, in buckets of at least this size. None: exchange after backward
    sparse          the sparse embedding gradient (dist/sparse_gradient.py), or None if it is not exchanged separately
    matrices        (start, rows, columns) of each matrix in the flat buffer; vectors are left out
    low_rank        rank of the factors that stand for a matrix, for powersgd
    outer           for diloco
    steps_made      the steps of the run before this start
    count           parameters in the flat buffer, without its pad; None if it has none
    """

    world: World
    buffers: OwnBuffers | NodeBuffers | OnDevice
    new_optimizer: Callable[[int, int], AdamW]
    sum_of_squares: Callable[[object], float]
    clipping: Clipping
    tracer: object
    server: str = "colocated"
    new_exchange: Callable = RingExchange
    final_ranges: tuple[tuple[int, int], ...] = ()
    bucket_bytes: int | None = None
    sparse: SparseGradient | None = None
    matrices: tuple[tuple[int, int, int], ...] = ()
    low_rank: int = 4
    outer: OuterSteps = OuterSteps()
    steps_made: int = 0
    count: int | None = None


@dataclass(frozen=True)
class Updated:
    """The float32 parameters [start, start + n) of the flat buffer, (n,), and the AdamW that updates them.

    more: {name: (n,) float32}, further arrays of this range for checkpoints.
    """

    start: int
    parameters: object
    optimizer: AdamW
    more: dict = field(default_factory=dict)

    @property
    def range(self) -> slice:
        return slice(self.start, self.start + len(self.parameters))


class Strategy:
    """How gradients become updated parameters on every rank. One subclass per file; its `name` is --strategy's value.

    `workers` ranks compute gradients. `worker` is this rank's index among them, or None if it computes no gradients.
    """

    name: str
    traits = Traits()

    def __init__(self, job: Job):
        self.comm = job.world.comm
        self.tracer = job.tracer
        self.parameters = job.buffers.parameters
        self.gradients = job.buffers.gradients
        self.sum_of_squares = job.sum_of_squares
        self.clipping = job.clipping
        self.workers = self.comm.size
        self.worker = self.comm.rank
        self.own = slice(0, self.parameters.shape[0])  # the range that this rank updates, if it has an optimizer
        self.optimizer = None

    def update(self, lr: float) -> float | None:
        """Exchange and update: on return every rank holds the same new parameters.

        Return the global norm of the gradients before clipping, on rank 0 at least.
        """
        raise NotImplementedError

    # Hooks.

    def before_use(self, start: int, stop: int) -> None:
        """Make parameters [start, stop) ready: the model is about to use this range of its layout.

        All ranks call this for the same ranges in the same order, in training, validation and for a checkpoint.
        """

    def gradients_final(self, start: int, stop: int) -> None:
        """Learn that backward has finished gradients [start, stop).

        Called during backward of the last microbatch, or of every microbatch if the strategy keeps no gradients.
        """

    def progress(self) -> None:
        """Advance started exchanges without waiting. Called after each kernel, with --overlap or pipeline stages."""

    def resumed(self) -> None:
        """Refresh memory that depends on `state`, after a checkpoint has filled state and parameters. Collective."""

    def state(self) -> list[Updated]:
        """Return the ranges that this rank updates. Those of all ranks together are the whole buffer."""
        return [Updated(self.own.start, self.parameters[self.own], self.optimizer)] if self.optimizer else []

    def own_arrays(self):
        """Yield (name, start, values) of arrays for checkpoints that no other rank holds. values: (n,) float32.

        A resumed run fills the arrays whose names are in the checkpoint, before it calls `resumed`. Collective.
        """
        return iter(())

    def evaluated(self):
        """Return a context in which `parameters` hold what validation, samples and exports use. Collective."""
        return nullcontext()

    def errors(self):
        """Return the accumulated rounding errors of this rank's gradients, (size,) float32, or None."""

    def clip(self, squares: float) -> tuple[float, float | None]:
        """Return (norm, factor) as Clipping.scale does.

        If the norm is not finite, also reset the rounding errors: a NaN in them would enter every later sum.
        """
        norm, scale = self.clipping.scale(squares)
        if not math.isfinite(norm) and (errors := self.errors()) is not None:
            errors.fill(0.0)
        return norm, scale
