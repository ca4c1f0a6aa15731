"""tree: our own all-reduce over two binary trees of all ranks, each of which carries half of the vector.

    for each tree: reduce its half of the gradients to its root, broadcast the sum;  AdamW on every rank

Each rank holds all optimizer state (2 D). A rank that is interior in one tree sends and receives 2 D, more than in a
ring, but in 2 log2(N) dependent messages instead of 2 (N-1). Use it for many ranks and small models.
The trees are in dist/host/host_tree.py, for GPUs in dist/gpu/device_tree.py.
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
        auto=("host",),  # between GPUs, NCCL's own all-reduce uses trees if they are faster
        host_exchange=TreeExchange,
        on_gpus=OnGpus({"float32": DeviceTree, "bfloat16": DeviceTree}),
        messages=two_trees,
    )
