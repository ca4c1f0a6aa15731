"""Cutting a flat buffer, or a batch, into contiguous parts."""

from itertools import pairwise


def cut(count: int, parts: int) -> list[tuple[int, int]]:
    """[start, stop) of each of `parts` ranges that tile [0, count); their sizes differ by at most one."""
    points = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(points))
