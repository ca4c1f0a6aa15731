"""zero-2: a rank holds optimizer state and gradient sums only for its part (Rajbhandari et al. 2020).

    each range that backward finishes, in each microbatch:  ring reduce-scatter, which adds to the own part's sum
    AdamW on the own part of each range;  each range: ring all-gather of the parameters

--overlap: the all-gathers go on during the next forward, which waits for each range before it uses the range.

The ranges are the layers, the embeddings, the final LayerNorm; each is cut among all ranks. A rank holds D parameters
and, for its parts, 3 D / N: sums and moments. No rank holds a complete gradient vector. Layers write their gradients to
two buffers in turn: one is sent while the next is computed (--overlap). The embeddings have their own buffer. Each rank
sends and receives (N-1)/N D per microbatch, and as much per step for the parameters. With rounding on the wire a rank
also keeps its part of the parameters in float32 (D / N).
"""

from dist.cost.memory import Memory
from dist.cost.messages import rings_of_ranges
from dist.cost.overlap import Overlap, embeddings_share
from dist.gpu.collectives import DeviceCollectives
from dist.gpu.device_ring import DeviceRing
from dist.sharded import ShardedGradients
from strategies.sharded import ShardedUpdate
from strategies.traits import OnGpus, Traits


def ranges_exchanged(ranges: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the exchanges of one step in order: ("reduce-scatter" or "all-gather", index of the range).

    ranges: the number of ranges, in the order of the flat buffer; 0: many small ranges, listed together as range 0.
    """
    ranges = max(ranges, 1)
    backward = [("reduce-scatter", index) for index in reversed(range(ranges))]
    return backward * microbatches + [("all-gather", index) for index in range(ranges)]


class Zero2(ShardedUpdate):
    name = "zero-2"
    traits = Traits(
        line="rings, layer by layer; gradients sharded too",
        wires=("float32", "bfloat16"),
        overlaps=True,
        keeps_gradients=False,
        memory=Memory(gradients="1/N", optimizer="2/N"),
        buffers=ShardedGradients,
        on_gpus=OnGpus({"float32": DeviceCollectives, "bfloat16": DeviceRing}),
        messages=lambda setting: rings_of_ranges(setting, ranges_exchanged(len(setting.ranges), setting.micro_steps)),
        overlap=lambda training: Overlap(1.0, embeddings_share(training), 1.0),  # the embeddings' gradient is the last
    )

    def __init__(self, job):
        super().__init__(job)
        self.overlapping = job.bucket_bytes is not None
        self.whole_ranges = dict(job.buffers.ranges)
        self.exchange = job.new_exchange(self.comm, job.buffers.ranges, one_at_a_time=True)
        self._divide(job, job.buffers.new_parts())
        self.reduction = None

    def gradients_final(self, start, stop):
        if start not in self.whole_ranges:
            return  # the second half of a layer: it is sent with the first half, which comes later
        stop = self.whole_ranges[start]
        with self.tracer.interruption("reduce_scatter", bytes=4 * (stop - start)):
            engine = self.exchange.engine
            if self.reduction is not None:
                engine.finish(self.reduction)  # backward writes the next range into the same memory
            self.reduction = engine.start(self._reduce_scatter(start, stop))
            if not self.overlapping or start == 0:  # at 0 backward has ended: no work is left to overlap with
                engine.finish(self.reduction)

    def progress(self):
        self.exchange.engine.progress()
