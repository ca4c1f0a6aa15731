"""tree: an all-reduce of our own, half of the vector up and down each of two binary trees of all ranks.

    for each tree: sum its half of the gradients up to its root, send it down again;  AdamW everywhere

Each rank holds all optimizer state (2 D). A rank inside one tree sends and receives 2 D: more than around the ring, in
2 log2(N) dependent messages instead of 2 (N-1). Use it for many ranks and small models.
The trees are dist/host/host_tree.py, and dist/gpu/device_tree.py between GPUs.
"""

from dist.cost.messages import two_trees
from dist.gpu.device_tree import DeviceTree
from dist.host.exchange import TreeExchange
from strategies.replicated import Replicated
from strategies.traits import OnGpus


class Tree(Replicated):
    name = "tree"
    traits = Replicated.traits.changed(
        line="two binary trees of all ranks",
        auto=("host",),  # between GPUs, NCCL's own all-reduce takes trees where they are faster
        host_exchange=TreeExchange,
        on_gpus=OnGpus({"float32": DeviceTree, "bfloat16": DeviceTree}),
        messages=two_trees,
    )
