"""Two binary trees over the same ranks, in which nobody is busy twice.

In one binary tree half of the ranks are leaves, which forward nothing, while every inside rank passes on what it got
from two. With a second tree in which the parts are exchanged, and half of the vector on each, all ranks send and
receive alike (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35, 2009; NCCL's double binary tree). `tree` sums one half of the vector up and down tree A and the
other half on tree B.
"""


def double_tree(size: int) -> tuple[list[int | None], list[int | None]]:
    """(parents in tree A, parents in tree B) of ranks 0 .. size-1; None for a tree's root.

    In each tree a rank has at most two children and is at most ceil(log2(size)) edges below the root. Every rank is
    inside (has children) in one tree and a leaf in the other, but for rank 0 of an odd size, which has one child in
    each: so no rank has more than two children in all.
    """
    parents = [_in_order_parent(rank, size) for rank in range(size)]
    if size % 2:  # tree B is tree A with everybody's place taken by the next rank
        shifted = [parents[rank - 1] for rank in range(size)]
        return parents, [None if parent is None else (parent + 1) % size for parent in shifted]
    mirrored = reversed(parents)  # rank r takes the place of size-1-r
    return parents, [None if parent is None else size - 1 - parent for parent in mirrored]


def _in_order_parent(rank: int, size: int) -> int | None:
    """A rank's parent in the tree whose leaves are the odd ranks and whose root is rank 0.

    A rank's lowest set bit is its height; the parent's is one higher. Where that rank does not exist, the bit is only
    cleared, which gives the nearest ancestor that does.
    """
    if rank == 0:
        return None
    lowest = rank & -rank
    parent = (rank ^ lowest) | (lowest << 1)
    return parent if parent < size else rank ^ lowest
