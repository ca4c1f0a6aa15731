"""Merge millions of text lines of many kinds in the order of time, and write them.

Lines are formatted in windows of time: one string of templates and one tuple of numbers for all lines of a window. That
is as fast as Python gets, and memory does not grow with the file.
"""

import gzip
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LINES_AT_ONCE = 200_000
HIGHEST_ORDER = 7


@contextmanager
def text_file(path: Path):
    """Open a new text file, gzipped if its name ends in .gz. Make its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Level 3 takes half the time of the default level and a fifth more space.
    with gzip.open(path, "wt", compresslevel=3) if path.suffix == ".gz" else path.open("w") as file:
        yield file


@dataclass(frozen=True)
class Lines:
    """Lines sorted by time. Line i is templates[kinds[i]] % (values[0][i], values[1][i], ...).

    times: (n,) int64. order: 0 .. HIGHEST_ORDER; among lines of equal time, lower ones come first. kinds: (n,) indices
    of templates; None if there is only one. values: (n,) integer arrays, as many as a template has placeholders.
    """

    times: np.ndarray
    order: int
    templates: list[str]
    values: tuple[np.ndarray, ...]
    kinds: np.ndarray | None = None


def write_merged(file, sources: list[Lines]) -> None:
    """Write all lines to a text file, in the order of time."""
    sources = [source for source in sources if len(source.times)]
    templates = [template for source in sources for template in source.templates]
    bases = np.cumsum([0, *(len(source.templates) for source in sources)])
    edges = _window_edges(sources)
    cuts = [np.searchsorted(source.times, edges) for source in sources]
    for window in range(len(edges) - 1):
        parts = [
            (source, base, slice(cut[window], cut[window + 1]))
            for source, base, cut in zip(sources, bases, cuts, strict=False)
            if cut[window] < cut[window + 1]
        ]
        if parts:
            file.write(_format(parts, templates))


def _window_edges(sources: list[Lines]) -> np.ndarray:
    """Return edges of time windows with about LINES_AT_ONCE lines each, judged by the source with the most lines."""
    total = sum(len(source.times) for source in sources)
    longest = max((source.times for source in sources), key=len)
    inner = longest[np.linspace(0, len(longest), total // LINES_AT_ONCE + 1, endpoint=False).astype(int)[1:]]
    highest = max(source.times[-1] for source in sources)
    return np.concatenate([[0], inner, [highest + 1]])


def _format(parts: list[tuple[Lines, int, slice]], templates: list[str]) -> str:
    count = sum(part.stop - part.start for _, _, part in parts)
    keys = np.empty(count, np.int64)
    kinds = np.empty(count, np.int64)
    values = np.empty((count, max(len(source.values) for source, _, _ in parts)), np.int64)
    widths = np.empty(count, np.int64)
    at = 0
    for source, base, part in parts:
        rows = slice(at, at + part.stop - part.start)
        keys[rows] = source.times[part] * (HIGHEST_ORDER + 1) + source.order
        kinds[rows] = base if source.kinds is None else base + source.kinds[part]
        widths[rows] = len(source.values)
        for column, numbers in enumerate(source.values):
            values[rows, column] = numbers[part]
        at = rows.stop
    by_time = np.argsort(keys, kind="stable")
    used = np.arange(values.shape[1]) < widths[by_time, None]
    text = "".join([templates[kind] for kind in kinds[by_time].tolist()])
    return text % tuple(values[by_time][used].tolist())
