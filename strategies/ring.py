"""ring: an all-reduce of our own, around a ring of all ranks in their order, and every rank does the same update.

    ring reduce-scatter(gradients), ring all-gather(gradients);  AdamW everywhere

Each rank holds all optimizer state (2 D) and sends and receives 2 (N-1)/N D. With several ranks a node, in the order of
the nodes, as much goes through each node's port: close to the bound of 2 (M-1)/M D where there are many nodes.
The ring itself is dist/host/ring.py, and dist/gpu/ring.py between GPUs.
"""

from dist.cost.messages import ring_of_ranks
from dist.gpu.ring import DeviceRing
from strategies.base import OnGpus
from strategies.replicated import Replicated


class Ring(Replicated):
    name, line = "ring", "a ring of all ranks"
    auto = ("host", "gpus")
    on_gpus = OnGpus({"float32": DeviceRing, "bfloat16": DeviceRing})
    messages = staticmethod(ring_of_ranks)
