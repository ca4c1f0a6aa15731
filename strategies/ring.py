"""ring: our own all-reduce, around a ring of all ranks in the order of their numbers; all make the same update.

    ring reduce-scatter(gradients), ring all-gather(gradients);  AdamW on every rank

Each rank holds all optimizer state (2 D) and sends and receives 2 (N-1)/N D. If ranks are numbered node by node, each
node's port carries as much: with many nodes this is close to the bound of 2 (M-1)/M D. The ring is in
dist/host/host_ring.py, for GPUs in dist/gpu/device_ring.py.
"""

from dist.cost.messages import ring_of
from dist.gpu.device_ring import DeviceRing
from strategies.replicated import Replicated
from strategies.traits import OnGpus


class Ring(Replicated):
    name = "ring"
    traits = Replicated.traits.changed(
        line="a ring of all ranks",
        auto=("host", "gpus"),
        on_gpus=OnGpus({"float32": DeviceRing, "bfloat16": DeviceRing}),
        messages=lambda setting: ring_of(setting.ranks, setting.blocks(len(setting.placement))),
    )
