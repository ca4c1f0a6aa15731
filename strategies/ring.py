"""ring: an all-reduce of our own, around a ring of all ranks in their order; every rank makes the same update.

    ring reduce-scatter(gradients), ring all-gather(gradients);  AdamW everywhere

Each rank holds all optimizer state (2 D) and sends and receives 2 (N-1)/N D. If ranks are numbered node by node, each
node's port carries as much: close to the bound of 2 (M-1)/M D where there are many nodes. The ring is
dist/host/host_ring.py, and dist/gpu/device_ring.py between GPUs.
"""

from dist.cost.messages import ring_of_ranks
from dist.gpu.device_ring import DeviceRing
from strategies.replicated import Replicated
from strategies.traits import OnGpus


class Ring(Replicated):
    name = "ring"
    traits = Replicated.traits.changed(
        line="a ring of all ranks",
        auto=("host", "gpus"),
        on_gpus=OnGpus({"float32": DeviceRing, "bfloat16": DeviceRing}),
        messages=ring_of_ranks,
    )
