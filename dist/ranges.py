"""Cutting a flat buffer, or a batch, into contiguous parts."""

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise


def cut(count: int, parts: int) -> list[tuple[int, int]]:
    """Return [start, stop) of `parts` ranges that tile [0, count); their sizes differ by at most one."""
    points = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(points))


def cut_range(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut [start, stop) in the same way."""
    return [(start + low, start + high) for low, high in cut(stop - start, parts)]


def side_by_side(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Return [start, stop) of ranges of these lengths, one after another from 0."""
    return list(pairwise(accumulate(lengths, initial=0)))


def cut_by_node(placement: list[int], start: int, stop: int) -> list[tuple[int, int]]:
    """Return each rank's part of [start, stop): an even share of its node's even share.

    placement: node of each rank, numbered from 0.
    """
    ranks_on = Counter(placement)
    shares = [cut_range(*share, ranks_on[node]) for node, share in enumerate(cut_range(start, stop, len(ranks_on)))]
    return [shares[node][local] for node, local in zip(placement, local_ranks(placement), strict=True)]


def local_ranks(placement: list[int]) -> list[int]:
    """Return each rank's number on its node."""
    before = Counter()
    numbers = []
    for node in placement:
        numbers.append(before[node])
        before[node] += 1
    return numbers


def divide_among_holders(held: list[list[tuple[int, int]]], stop: int) -> list[list[tuple[int, int]]]:
    """Give each element of [0, stop) to one rank that holds it.

    held: each rank's ranges; the result: each rank's parts of them. Elements that several ranks hold are cut among
    them; elements that none holds are in no part.
    """
    points = sorted({0, stop} | {min(point, stop) for ranges in held for one in ranges for point in one})
    parts = [[] for _ in held]
    for low, high in pairwise(points):
        holders = [rank for rank, ranges in enumerate(held) if any(a <= low and high <= b for a, b in ranges)]
        for rank, (start, end) in zip(holders, cut(high - low, len(holders) or 1), strict=False):
            if start < end:
                parts[rank].append((low + start, low + end))
    return parts


def longest(ranges) -> int:
    """Return the length of the longest of some (start, stop)."""
    return max(stop - start for start, stop in ranges)
