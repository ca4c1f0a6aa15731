"""What every strategy is given, and the one method it must have."""

from collections.abc import Callable
from dataclasses import dataclass

from dist.buffers import NodeBuffers, OwnBuffers
from dist.exchanges import Rings
from dist.gpu.buffers import DeviceBuffers
from dist.probe.links import MOST_SEGMENT_BYTES
from dist.world import World
from gpt2.optimizer import AdamW, Clipping


@dataclass(frozen=True)
class Job:
    """What a strategy works with.

    world           where this rank is; its `comm` has MPI's collectives for arrays that lie where the buffers do
    buffers         this rank's flat float32 `parameters`, filled, and `gradients`, (size,), size a multiple of the
                    ranks; of the kind that the strategy's class names, so perhaps not whole (dist/sharded.py), or
                    their form on a GPU (dist/gpu/buffers.py)
    new_optimizer   (start, stop): an AdamW with state for that range alone
    sum_of_squares  (flat): a float
    max_norm, outlier_z   as gpt2.optimizer.Clipping's
    tracer          tracer.phase(name, bytes=, root=) times what is inside
    server          "colocated" or "dedicated", for the strategy that has a server

    For strategies that write their own exchange:

    wire            the dtype of what travels: "float32", "bfloat16"
    error_feedback  whether what rounding loses is added again in the next step
    segment_bytes   the most that one message holds (dist.probe.links.segment_bytes)
    final_ranges    the parts of the flat buffer in the order in which backward makes them final
    bucket_bytes    exchange them during backward, that much at once or more; None: after it
    new_exchange    (comm, ranges, wire, segment_bytes): what exchanges ranges where the buffers lie
                    (dist/exchanges.py)
    """

    world: World
    buffers: OwnBuffers | NodeBuffers | DeviceBuffers
    new_optimizer: Callable[[int, int], AdamW]
    sum_of_squares: Callable[[object], float]
    max_norm: float
    tracer: object
    server: str = "colocated"
    wire: str = "float32"
    error_feedback: bool = False
    outlier_z: float = 0.0
    segment_bytes: int = MOST_SEGMENT_BYTES
    final_ranges: tuple[tuple[int, int], ...] = ()
    bucket_bytes: int | None = None
    new_exchange: Callable = Rings


@dataclass(frozen=True)
class Updated:
    """Parameters (n,) float32 from `start` of the flat buffer on, in which updates add up, and the AdamW of theirs."""

    start: int
    parameters: object
    optimizer: AdamW


class Strategy:
    """How gradients become updated parameters on every rank: one subclass a file.

    `workers` ranks compute gradients; this rank is number `worker` of them, or None if it computes nothing.
    """

    buffers = OwnBuffers  # the kind of memory it wants
    keeps_gradients = True  # until the update; False: each micro-step's are taken away as they become final

    def __init__(self, job: Job):
        self.comm, self.tracer = job.world.comm, job.tracer
        self.parameters, self.gradients = job.buffers.parameters, job.buffers.gradients
        self.sum_of_squares, self.clipping = job.sum_of_squares, Clipping(job.max_norm, job.outlier_z)
        self.workers, self.worker = self.comm.size, self.comm.rank
        self.own = slice(0, self.parameters.shape[0])  # what it updates, unless it says otherwise
        self.optimizer = None

    def before_use(self, start: int, stop: int) -> None:
        """Called before parameters [start, stop), one of the layout's ranges, are used: see gpt2.model.GPT2.

        All ranks use the same ranges in the same order, in training, validation and when a checkpoint is written.
        """

    def gradients_final(self, start: int, stop: int) -> None:
        """Called during the last micro-step's backward: gradients [start, stop) will not change any more.

        Of a strategy that does not keep gradients, during every micro-step's.
        """

    def poke(self) -> None:
        """Called often during forward and backward: a moment to move on what is under way, without waiting."""

    def update(self, lr: float) -> float:
        """Exchange and update: on return every rank holds the same new parameters. Returns, on rank 0 at least,
        the global norm of the gradients before clipping."""
        raise NotImplementedError

    def state(self) -> list[Updated]:
        """What this rank updates: what a checkpoint saves of it. Together the ranks' ranges are the whole buffer."""
        return [Updated(self.own.start, self.parameters[self.own], self.optimizer)] if self.optimizer else []

    def errors(self):
        """What rounding for the wire has taken from this rank's gradients so far, (size,) float32, where the
        buffers lie, or None."""

    def resumed(self) -> None:
        """The parameters, and all that `state` gave, were filled from a checkpoint. Collective."""
