"""What a strategy declares about itself, so that no file outside strategies/ needs to know its name."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from dist.buffers import OwnBuffers
from dist.cost.memory import VECTOR_BYTES, Memory
from dist.cost.overlap import Overlap, Training
from dist.host.exchange import RingExchange
from dist.host.operation import MpiSum, OwnSum, new_operation
from dist.host.wire_comm import WireComm
from dist.wire import WIRE_BYTES, WireFormat
from dist.world import World


@dataclass(frozen=True)
class OnGpus:
    """How a strategy exchanges arrays that lie on GPUs.

    exchanges: by --wire, the class that exchanges ranges there (dist/gpu). Empty for a strategy that calls the
    communicator itself: such calls send float32, after backward.
    """

    exchanges: dict[str, type] = field(default_factory=dict)
    form: type | None = None  # the class that runs on GPUs, if it is not the strategy's own
    overlapped: type | None = None  # the class that runs with --overlap, where each bucket must be a call of its own


@dataclass(frozen=True)
class Traits:
    """What others may know of a strategy without running it."""

    line: str = ""  # what it does, for tables
    exchanges: bool = True  # False: every rank trains a model of its own
    servers: tuple[str, ...] = ("colocated",)  # values of --server that it takes
    wires: tuple[str, ...] = ("float32",)  # values of --wire
    operations: tuple[str, ...] = ()  # values of --op: what its MPI collectives add with; empty if it calls none
    error_feedback: bool = False  # whether it can add what rounding lost to the next step's gradients
    overlaps: bool = False  # whether it can exchange during backward, in host memory
    splits_embedding: bool = False  # whether it can exchange the sparse embedding gradient apart (Job.sparse)
    shares_sums: bool = False  # whether only sums of gradients travel, and each rank makes its parameters from them
    keeps_gradients: bool = True  # False: it takes each microbatch's gradients away as they become final
    knows_nodes: bool = False  # whether its messages depend on which ranks share a node
    auto: tuple[str, ...] = ()  # where --strategy auto may choose it: "host", "gpus"
    memory: Memory = field(default_factory=Memory)  # what a rank holds
    buffers: type = OwnBuffers  # the class that makes its parameters and gradients
    host_exchange: type = RingExchange  # the class that exchanges ranges in host memory, if it does not call MPI's
    on_gpus: OnGpus | None = None  # None: it exchanges through host memory
    messages: Callable | None = None  # (dist.cost.messages.Setting): its message schedule, to predict its time
    sparse_messages: Callable | None = None  # (dist.cost.sparse_rows): the messages of the sparse embedding gradient
    overlap: Callable[[Training], Overlap | None] = lambda training: None  # what --overlap hides

    def changed(self, **fields) -> "Traits":
        """Return these traits with other values of some fields."""
        return replace(self, **fields)

    def item_bytes(self, wanted: int) -> int:
        """Return `wanted`, the bytes of one gradient on the wire, if the strategy can send it; else float32's."""
        return wanted if wanted in (WIRE_BYTES[wire] for wire in self.wires) else VECTOR_BYTES

    def new_operation(self, wire_format: WireFormat) -> MpiSum | OwnSum:
        """Return the operation that its MPI collectives add with; the caller closes it."""
        return new_operation(wire_format) if self.operations else MpiSum()

    def in_host_memory(self, world: World, wire_format: WireFormat, operation) -> dict:
        """Return the `world` and `new_exchange` of a Job in host memory. operation: an MPI.Op."""
        exchange = partial(self.host_exchange, wire_format=wire_format)
        if self.operations:
            world = replace(world, comm=WireComm(world.comm, wire_format, operation))
        return {"world": world, "new_exchange": exchange}
