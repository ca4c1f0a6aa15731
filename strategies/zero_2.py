"""zero-2: a rank holds the optimizer state and the summed gradients of its part alone (Rajbhandari et al. 2020).

    each range that backward finishes, in each micro-step:  ring reduce-scatter, the own part added to a sum
    AdamW on the own part of each range;  each range: ring all-gather of the parameters

--overlap: the all-gathers go on during the next forward, which waits for each range's when it comes to use it.

The ranges are the layers, the embeddings, the final LayerNorm; each is cut among all ranks. A rank holds D parameters
and, for its parts, 3 D / N: sums and moments. No gradient vector is whole: layers write theirs in two buffers in turn,
one travelling while the next is computed (--overlap), and the embeddings have one of their own. Through each rank go
(N-1)/N D in and out a micro-step, and as much a step for the parameters. Where what travels is rounded a rank also
keeps its part of the parameters in float32 (D / N).
"""

from dist.cost.memory import Memory
from dist.cost.messages import rings_of_ranges
from dist.cost.overlap import Overlap, embeddings_share
from dist.gpu.calls import DeviceCalls
from dist.gpu.ring import DeviceRing
from dist.sharded import ShardedGradients
from strategies.base import OnGpus
from strategies.sharded import ShardedUpdate


class Zero2(ShardedUpdate):
    name, line = "zero-2", "rings, layer by layer; gradients sharded too"
    wires, overlaps = ("float32", "bfloat16"), True
    memory = Memory(gradients="1/N", optimizer="2/N")
    on_gpus = OnGpus({"float32": DeviceCalls, "bfloat16": DeviceRing})
    buffers = ShardedGradients
    keeps_gradients = False

    @staticmethod
    def messages(setting):
        return rings_of_ranges(setting, ranges_exchanged(len(setting.ranges), setting.micro_steps))

    @staticmethod
    def overlap(training):
        """Reductions run in all micro-steps, and in each that of the embeddings shows, whose gradient is the last."""
        return Overlap(1.0, embeddings_share(training), 1.0)

    def __init__(self, job):
        super().__init__(job)
        self.overlapping = job.bucket_bytes is not None
        self.whole_ranges = dict(job.buffers.ranges)
        self.exchange = job.new_exchange(self.comm, job.buffers.ranges, one_at_a_time=True)
        self._divide(job, job.buffers.ranges, job.buffers.new_parts())
        self.reduction = None

    def gradients_final(self, start, stop):
        if start not in self.whole_ranges:
            return  # the second half of a layer: it travels with the first, which comes later
        stop = self.whole_ranges[start]
        with self.tracer.interruption("reduce_scatter", bytes=4 * (stop - start)):
            progress = self.exchange.progress
            if self.reduction is not None:
                progress.finish(self.reduction)  # of the range before: the next one is written where it lies
            self.reduction = progress.start(self._reduce_scatter(start, stop))
            if not self.overlapping or start == 0:  # backward has ended: there is nothing to do meanwhile
                progress.finish(self.reduction)

    def poke(self):
        self.exchange.progress.poke()

    def update(self, lr):
        return self._update_and_share(lr)


def ranges_exchanged(ranges: int, micro_steps: int) -> list[tuple[str, int]]:
    """("reduce-scatter" or "all-gather", index of the range), of one step in their order.

    ranges: how many, in the order of the flat buffer; 0 for many small ones, for which range 0 stands.
    """
    ranges = max(ranges, 1)
    backward = [("reduce-scatter", index) for index in reversed(range(ranges))]
    return backward * micro_steps + [("all-gather", index) for index in range(ranges)]
