"""What strategies are on GPUs, where every exchange of ranges is queued on a stream (dist/exchanges.py).

    each bucket that backward finishes:  all-reduce, or reduce-scatter of which each rank owns a part
    AdamW everywhere, or on the own part of each bucket;  each bucket: all-gather of the parameters

Without overlap there is one bucket, the whole buffer, after backward. With it the calls are queued on a stream beside
the one that computes, and the all-gathers go on during the next forward, which waits for the buckets of a range when it
comes to use it. A rank holds all optimizer state (2 D), or that of its parts (2 D / N where all ranks own alike; with
bfloat16 on the wire D / N more, the parameters of its parts in float32, as what is gathered is rounded). With error
feedback it holds D more, what rounding took from its gradients.
"""

from dataclasses import dataclass, field
from functools import partial

from dist.gpu.buffers import device_zeros
from dist.gpu.calls import AllreduceCall, DeviceCalls
from dist.gpu.node_exchange import NodeExchange
from dist.gpu.ring import DeviceRing
from dist.gpu.tree import DeviceTree
from dist.sharded import Parts
from strategies.base import Strategy
from strategies.bucketed import InBuckets
from strategies.none import NoExchange
from strategies.reduce_bcast import ReduceBcast
from strategies.sharded_update import ShardedUpdate
from strategies.sliced import Sliced
from strategies.zero_2 import Zero2
from strategies.zero_3 import Zero3


class InDeviceBuckets(InBuckets):
    """Buckets with what they are exchanged by, and what its rounding takes from the gradients."""

    def __init__(self, job):
        super().__init__(job)
        self.exchange = job.new_exchange(self.comm, self.buckets, job.wire, job.segment_bytes)
        self.progress = self.exchange.progress
        self._errors = device_zeros(self.comm.device, len(self.gradients)) if job.error_feedback else None

    def errors(self):
        return self._errors

    def _errors_of(self, start, stop):
        """What an exchange that rounds is to have beside a bucket's gradients."""
        return [] if self._errors is None else [self._errors[start:stop]]


class DeviceAllreduce(InDeviceBuckets):
    def __init__(self, job):
        super().__init__(job)
        self.optimizer = job.new_optimizer(0, len(self.parameters))

    def start_exchange(self, start, stop):
        self.progress.start(self.exchange.allreduce(self.gradients[start:stop], *self._errors_of(start, stop)))

    def update(self, lr):
        with self.tracer.phase("allreduce", bytes=self.gradients.nbytes):
            self.finish_exchange()
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(self.sum_of_squares(self.gradients))
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm


class DeviceReduceScatter(InDeviceBuckets, ShardedUpdate):
    def __init__(self, job):
        super().__init__(job)
        owned = {bucket: self.exchange.own_part(*bucket) for bucket in reversed(self.buckets)}
        self._divide(job, [*owned], Parts(owned, partial(device_zeros, self.comm.device)))

    def start_exchange(self, start, stop):
        self.progress.start(self._reduce_scatter(start, stop, *self._errors_of(start, stop)))

    def update(self, lr):
        with self.tracer.phase("reduce_scatter", bytes=self.gradients.nbytes):
            self.finish_exchange()
        return self._update_and_share(lr)


@dataclass(frozen=True)
class DeviceForm:
    """kind: what a strategy is on GPUs. exchanges: by --wire, what it exchanges ranges by; none: it makes calls of
    mpi4py's itself, which a DeviceComm has, in float32 and after backward."""

    kind: type[Strategy]
    exchanges: dict[str, type] = field(default_factory=dict)


ONE_CALL, CALLS = {"float32": AllreduceCall}, {"float32": DeviceCalls}
RING = {"float32": DeviceRing, "bfloat16": DeviceRing}
TREE = {"float32": DeviceTree, "bfloat16": DeviceTree}
NODES = {"float32": NodeExchange, "bfloat16": NodeExchange}
CALLS_OR_RING = {"float32": DeviceCalls, "bfloat16": DeviceRing}
DEVICE_FORMS = {  # one that is not here goes through host memory
    "none": DeviceForm(NoExchange),
    "reduce-bcast": DeviceForm(ReduceBcast),
    "sliced": DeviceForm(Sliced),
    "reduce-scatter": DeviceForm(DeviceReduceScatter, CALLS),
    "allreduce": DeviceForm(DeviceAllreduce, ONE_CALL),
    "ring": DeviceForm(DeviceAllreduce, RING),
    "tree": DeviceForm(DeviceAllreduce, TREE),
    "hierarchical": DeviceForm(DeviceAllreduce, NODES),
    "hierarchical-sharded": DeviceForm(DeviceReduceScatter, NODES),
    "zero-2": DeviceForm(Zero2, CALLS_OR_RING),
    "zero-3": DeviceForm(Zero3, CALLS_OR_RING),
}
