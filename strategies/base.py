"""What every strategy is given, what it declares of itself, and the one method it must have."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from dist.buffers import NodeBuffers, OwnBuffers
from dist.cost.memory import VECTOR_BYTES, Memory
from dist.cost.overlap import ALL_REDUCED, Overlap, Training
from dist.gpu.buffers import OnDevice
from dist.host.exchange import FLOAT32, RingExchange
from dist.host.operation import MpiSum, OwnSum, new_operation
from dist.looked_up import LookedUp
from dist.mpi import MPI
from dist.wire import WIRE_BYTES, Wire, WireFormat
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
    max_norm, outlier_z, over_model   as gpt2.optimizer.Clipping's
    tracer          tracer.phase(name, bytes=, root=) times what is inside
    server          "colocated" or "dedicated", for a strategy that has a server

    For strategies that call MPI's collectives:

    operation       what adds: an MPI.Op for arrays of the wire's dtype
    new_wire        (size): how a vector travels (dist/wire.py)

    For strategies that do not call MPI's collectives themselves:

    new_exchange    (comm, ranges): what exchanges ranges where the buffers lie (dist/host/exchange.py)
    final_ranges    the parts of the flat buffer in the order in which backward makes them final
    bucket_bytes    exchange them during backward, that much at once or more; None: after it
    lookup          the rows of the token embedding that a step looks up, if they are exchanged apart from it
                    (dist/looked_up.py; final_ranges are split then, see gpt2.parameters.Layout), or None
    all_reduced     of what is gathered after the update, the part that may be all-reduced before it instead
    """

    world: World
    buffers: OwnBuffers | NodeBuffers | OnDevice
    new_optimizer: Callable[[int, int], AdamW]
    sum_of_squares: Callable[[object], float]
    max_norm: float
    tracer: object
    server: str = "colocated"
    outlier_z: float = 0.0
    over_model: Callable[[float], float] = float
    operation: object = field(default_factory=lambda: MPI.SUM)
    new_wire: Callable[[int], Wire] = FLOAT32.new
    new_exchange: Callable = RingExchange
    final_ranges: tuple[tuple[int, int], ...] = ()
    bucket_bytes: int | None = None
    lookup: LookedUp | None = None
    all_reduced: Fraction = ALL_REDUCED


@dataclass(frozen=True)
class Updated:
    """Parameters (n,) float32 from `start` of the flat buffer on, in which updates add up, and the AdamW of theirs."""

    start: int
    parameters: object
    optimizer: AdamW


@dataclass(frozen=True)
class OnGpus:
    """How a strategy exchanges arrays that lie on GPUs.

    exchanges: by --wire, what moves ranges there (dist/gpu); none for a page of calls on the communicator, which are of
    float32 and come after backward. form: the class that runs there, where the strategy's own cannot; overlapped: the
    one for --overlap, where each bucket has to be a call of its own. The strategy's file says why there is one.
    """

    exchanges: dict[str, type] = field(default_factory=dict)
    form: type | None = None
    overlapped: type | None = None


class Strategy:
    """How gradients become updated parameters on every rank: one subclass a file.

    `workers` ranks compute gradients; this rank is number `worker` of them, or None if it computes nothing.
    """

    # What others need to know of it without running it. Nothing outside its file names a strategy.
    name: str  # --strategy
    line = ""  # what it does, for a table
    exchanges = True  # False: ranks train models of their own
    servers = ("colocated",)  # --server
    wires = ("float32",)  # --wire
    operations = ()  # --op: what its calls of MPI's collectives may add with
    error_feedback = False  # whether it can keep what rounding takes, and add it to the next step's gradients
    overlaps = False  # whether it can exchange while the model computes, in host memory
    splits_embedding = False  # whether it can exchange looked-up rows apart, in host memory (Job.lookup)
    all_reduces_a_part = False  # whether it may do so with what it would gather after the update (Job.all_reduced)
    shares_sums = False  # whether the sums alone travel, and every rank makes its parameters of them
    knows_nodes = False  # whether what it sends depends on who sits on which node
    auto = ()  # where --strategy auto may take it: "host", "gpus"
    memory = Memory()  # what a rank holds
    host_exchange = RingExchange  # what exchanges ranges in host memory, where it makes no calls of its own
    on_gpus: OnGpus | None = None  # None: through host memory
    messages = None  # staticmethod (dist.cost.messages.Setting): its message schedule, for the cost model
    row_messages = None  # staticmethod (dist.cost.rows.RowMessages): those of looked-up rows apart

    @staticmethod
    def overlap(training: Training) -> Overlap | None:
        """What of its exchange --overlap can hide, for the cost model; None: nothing."""

    @classmethod
    def item_bytes(cls, asked: int) -> int:
        """Bytes of one gradient as it travels where so many are asked for: calls of MPI's own send float32 always."""
        return asked if asked in (WIRE_BYTES[wire] for wire in cls.wires) else VECTOR_BYTES

    @classmethod
    def new_operation(cls, wire_format: WireFormat) -> MpiSum | OwnSum:
        """What its calls of MPI's collectives add with. To be closed."""
        return new_operation(wire_format) if cls.operations else MpiSum()

    buffers = OwnBuffers  # the kind of memory it wants
    keeps_gradients = True  # until the update; False: each micro-step's are taken away as they become final

    def __init__(self, job: Job):
        self.comm, self.tracer = job.world.comm, job.tracer
        self.parameters, self.gradients = job.buffers.parameters, job.buffers.gradients
        self.sum_of_squares = job.sum_of_squares
        self.clipping = Clipping(job.max_norm, job.outlier_z, over_model=job.over_model)
        self.workers, self.worker = self.comm.size, self.comm.rank
        self.own = slice(0, self.parameters.shape[0])  # what it updates, unless it says otherwise
        self.optimizer = None

    def before_use(self, start: int, stop: int) -> None:
        """Called before parameters [start, stop), one of the layout's ranges, are used: see gpt2.model.GPT2.

        With Job.lookup they are the split ones in training, the first of which is no range: LOOKUP, the rows of
        the token embedding that the step looks up.

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

    def clip(self, squares: float) -> tuple[float, float | None]:
        """As Clipping.scale. What rounding took from gradients that are not finite is no number, and would be in every
        later sum: it is forgotten."""
        norm, scale = self.clipping.scale(squares)
        errors = self.errors()
        if errors is not None and not math.isfinite(norm):
            errors.fill(0.0)
        return norm, scale

    def resumed(self) -> None:
        """The parameters, and all that `state` gave, were filled from a checkpoint. Collective."""


class Around(Strategy):
    """A strategy around a strategy: it does what that one does, and its subclass something more, between that one and
    the model."""

    def __init__(self, strategy: Strategy):
        self.strategy, self.clipping = strategy, strategy.clipping
        self.worker, self.workers, self.keeps_gradients = strategy.worker, strategy.workers, strategy.keeps_gradients

    def before_use(self, start, stop):
        self.strategy.before_use(start, stop)

    def gradients_final(self, start, stop):
        self.strategy.gradients_final(start, stop)

    def poke(self):
        self.strategy.poke()

    def update(self, lr):
        return self.strategy.update(lr)

    def state(self):
        return self.strategy.state()

    def errors(self):
        return self.strategy.errors()

    def resumed(self):
        self.strategy.resumed()
