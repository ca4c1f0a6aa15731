"""Stages of an exchange, one after another, each a set of messages in flight at the same time."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Stage:
    """K messages under way at the same time. A stage of dependent steps (a ring) holds the bytes of all steps."""

    source: np.ndarray  # ranks, int64 (K,)
    destination: np.ndarray
    size: np.ndarray  # bytes, int64 (K,)
    steps: int = 1  # messages that wait for one another
    added: int = 0  # bytes that the busiest rank adds after the messages have arrived, while the network is idle
    added_meanwhile: int = 0  # bytes that the busiest rank adds while messages arrive
    exchange_apart: bool = False  # the two ranks of a pair begin their exchange at different times: see replay.py
    all_together: bool = False  # no rank is ahead of the others: a pipeline of segments, or a barrier
    repeat: int = 1  # the stage happens this many times, with the same bytes each time


def stage(source, destination, size, **properties) -> Stage:
    """Make a Stage of array-likes, broadcast to one length; drop empty messages and messages to oneself."""
    arrays = np.broadcast_arrays(*(np.asarray(values, np.int64) for values in (source, destination, size)))
    source, destination, size = (np.atleast_1d(array) for array in arrays)
    sent = (size > 0) & (source != destination)
    return Stage(source[sent], destination[sent], size[sent], **properties)


def backwards(stages: list[Stage]) -> list[Stage]:
    """Send the same messages back, the last stage first, without adding: turn a reduction tree into a broadcast."""
    return [stage(one.destination, one.source, one.size) for one in reversed(stages)]


def side_by_side(stages: list[Stage], groups: int) -> list[Stage]:
    """Let `groups` groups of ranks run these stages at once: rank r of group k is r * groups + k."""
    each = np.arange(groups)
    return [
        replace(
            one,
            source=np.add.outer(one.source * groups, each).ravel(),
            destination=np.add.outer(one.destination * groups, each).ravel(),
            size=np.repeat(one.size, groups),
        )
        for one in stages
    ]


def doublings(count: int) -> list[int]:
    """Return 1, 2, 4, ... below `count`: the distance between partners in each round."""
    return [1 << number for number in range((count - 1).bit_length())]


def barrier() -> Stage:
    """Make a stage in which all ranks wait for one another. Its few bytes are not counted."""
    return stage([], [], [], all_together=True)


def leaders_of(placement: np.ndarray) -> np.ndarray:
    """Return the first rank of each node."""
    return np.unique(placement, return_index=True)[1]


def node_traffic(stages: list[Stage], placement: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (bytes into, bytes out of) each node's port, int64 (nodes,). placement: the node of each rank."""
    node = np.asarray(placement)
    count = int(node.max()) + 1
    into = np.zeros(count, np.int64)
    out = np.zeros(count, np.int64)
    for one in stages:
        source = node[one.source]
        destination = node[one.destination]
        crossing = one.size * one.repeat * (source != destination)
        # Sums of whole numbers below 2**53: exact in float64.
        into += np.bincount(destination, crossing, count).astype(np.int64)
        out += np.bincount(source, crossing, count).astype(np.int64)
    return into, out
