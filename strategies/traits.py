"""The properties that a strategy declares, so that no file outside strategies/ needs to know its name."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from dist.buffers import OwnBuffers
from dist.cost.memory import VECTOR_BYTES, Memory
from dist.cost.overlap import Overlap, Training
from dist.host.direct_exchange import DirectExchange
from dist.host.exchange import RingExchange
from dist.host.operation import new_operation
from dist.host.wire_comm import WireComm
from dist.wire import WIRE_BYTES, WireFormat
from dist.world import World


@dataclass(frozen=True)
class OnGpus:
    """How a strategy exchanges arrays that lie on GPUs.

    exchanges: {value of --wire: the class that exchanges ranges between GPUs (dist/gpu)}. Empty for a strategy that
    calls the communicator itself: such calls send float32, after backward.
    """

    exchanges: dict[str, type] = field(default_factory=dict)
    form: type | None = None  # the class that runs on GPUs, if it is not the strategy's class
    overlapped: type | None = None  # the class for --overlap, if each bucket must be a separate call


@dataclass(frozen=True)
class Traits:
    """Properties of a strategy that other code can read without running it."""

    line: str = ""  # what the strategy does, for tables
    exchanges: bool = True  # False: every rank trains its own model
    servers: tuple[str, ...] = ("colocated",)  # accepted values of --server
    wires: tuple[str, ...] = ("float32",)  # accepted values of --wire
    operations: tuple[str, ...] = ()  # accepted values of --op; empty if it calls no MPI collectives
    error_feedback: bool = False  # whether it can add rounding errors to the next step's gradients
    overlaps: bool = False  # whether it can exchange during backward, in host memory
    splits_embedding: bool = False  # whether it accepts Job.sparse, the sparse embedding gradient
    shares_sums: bool = False  # whether it sends gradient sums only, never parameters
    keeps_gradients: bool = True  # False: it exchanges the gradients of every microbatch as they become final
    knows_nodes: bool = False  # whether its messages depend on which ranks share a node
    same_weights: bool = True  # whether its weights equal those of the other strategies, up to rounding
    shares_models: bool = True  # whether several ranks may share a model
    takes_local_steps: bool = False  # whether replicas make Training.local_steps steps alone between exchanges
    flags: tuple[str, ...] = ()  # the flags of train.py that belong to it alone
    auto: tuple[str, ...] = ()  # where --strategy auto may choose it: "host", "gpus"
    memory: Memory = field(default_factory=Memory)  # formulas of the memory of a rank
    buffers: type = OwnBuffers  # the class that allocates its parameters and gradients
    host_exchange: type = RingExchange  # exchanges ranges in host memory, unless it calls MPI's collectives
    on_gpus: OnGpus | None = None  # None: it exchanges through host memory
    messages: Callable | None = None  # (dist.cost.messages.Setting): its messages, to predict their time
    sparse_messages: Callable | None = None  # (dist.cost.sparse_rows): the messages of the sparse embedding gradient
    overlap: Callable[[Training], Overlap | None] = lambda training: None  # what --overlap hides

    def changed(self, **fields) -> "Traits":
        """Return these traits with other values of some fields."""
        return replace(self, **fields)

    def item_bytes(self, wanted: float) -> float:
        """Return `wanted`, a gradient's bytes on the wire, if the strategy supports this format; else float32's 4."""
        return wanted if wanted in (WIRE_BYTES[wire] for wire in self.wires) else VECTOR_BYTES

    def gives_same_weights(self, wanted: float) -> bool:
        """Return whether it gives the weights of all others, up to rounding to bfloat16. wanted: see item_bytes."""
        return self.same_weights and self.item_bytes(wanted) >= WIRE_BYTES["bfloat16"]

    def new_operation(self, wire_format: WireFormat):
        """Return an object whose `op` its MPI collectives add with; the caller closes it."""
        return new_operation(wire_format if self.operations else WireFormat())

    def in_host_memory(self, world: World, wire_format: WireFormat, operation) -> dict:
        """Return the `world` and `new_exchange` of a Job in host memory. operation: an MPI.Op."""
        kind = DirectExchange if wire_format.wire == "int8" else self.host_exchange
        exchange = partial(kind, wire_format=wire_format)
        if self.operations:
            world = replace(world, comm=WireComm(world.comm, wire_format, operation))
        return {"world": world, "new_exchange": exchange}
