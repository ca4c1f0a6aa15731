"""Part of make_docs.py: figures of all ports during an exchange of each strategy, on virtual hosts, as root.

A thread of this process reads the counters of the virtual switch while a benchmark runs on the virtual hosts. Reading
them on the hosts would disturb the exchange.
"""

import os
import re
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import numpy as np

from scripts.cluster.hosts import HEAD_MARK, child_processes, command_line, head_keepers
from scripts.makers.pages.page import FIGURES, on_hosts, read
from scripts.settings.units import bytes_per_s
from traces.plots import look, ports_in_time

FIGURE_OF = {"Open MPI": "strategies", "MPICH": "strategies-mpich"}
WATCHED = "watched.json"  # the benchmark's report
EVERY_S = 0.005  # between two readings of the counters
PIECE_S = 0.02  # of a column of the picture: at 400 Mbit/s, 15 of the large packets that the kernel hands to a port
EDGE = 0.005  # this share of an exchange's bytes may pass before its begin, and after its end
# A line of /proc/net/dev on the switch: bytes received from a node, seven other counts, bytes sent to the node.
COUNTERS = re.compile(r"^ *node(\d+): *(\d+)(?: +\d+){7} +(\d+)", re.MULTILINE)


def strategies(part, folder: Path) -> dict[str, str]:
    """Draw the ports during one exchange of each strategy, under the MPI of this Python. This part has no text."""
    found = [watched(part, folder, name, seen) for name, seen in part.drawn.items()]
    report = read(folder / WATCHED)
    facts = {key: report[key] for key in ("mpi_library", "machine", "ranks")} | {"rate": bytes_per_s(part.rate)}
    stem = next(figure for library, figure in FIGURE_OF.items() if report["mpi_library"].startswith(library))
    look.save(ports_in_time.draw(found, facts), folder / stem)
    shutil.copy(folder / f"{stem}.png", FIGURES / f"{stem}.png")
    return {}


def watched(part, folder: Path, name: str, seen: str) -> dict:
    """Measure one exchange for ports_in_time.draw: `used` is from the counters, times are from the benchmark."""
    file = folder / WATCHED
    flags = part.watched.split()
    with sampling() as samples:
        on_hosts(part.hosts, "bench_exchange.py", "--strategies", name, *flags, "--json", file)
    (size,) = read(file)["sizes"]
    one = size["contenders"][name]
    piece_s, passed = in_pieces(*exchange_of(samples, np.sum(one["node_bytes"])))
    used = passed / (piece_s * bytes_per_s(part.rate))
    facts = {"name": name, "seen": seen, "bytes": size["bytes"], "bound_s": size["bound_s"]}
    return facts | {"seconds": one["seconds"]["median"], "used": used, "piece_s": piece_s}


@contextmanager
def sampling():
    """Yield a list. While the block runs a virtual cluster, append (seconds, bytes so far (nodes, in/out)) to it."""
    samples = []
    done = Event()
    thread = Thread(target=sample, args=(samples, done), daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def sample(samples: list, done: Event) -> None:
    """Sample the ports of the cluster that a child of this process starts, until `done` is set."""
    head = None
    while not done.wait(EVERY_S):
        head = head or own_head()
        if head:
            try:
                counts = port_bytes(Path(f"/proc/{head}/net/dev").read_text())
            except OSError:  # the cluster has ended
                return
            samples.append((time.perf_counter(), counts))


def own_head() -> int | None:
    """Return the process that holds the head of a child's virtual cluster, or None."""
    children = child_processes(os.getpid())
    for keeper in head_keepers():
        words = command_line(keeper)
        if HEAD_MARK in words and int(words[words.index(HEAD_MARK) + 3]) in children:
            return keeper
    return None


def port_bytes(text: str) -> np.ndarray:
    """Return bytes (nodes, in/out) from /proc/net/dev of the switch. What the switch sends is a node's `in`."""
    found = {int(node): (int(sent), int(received)) for node, received, sent in COUNTERS.findall(text)}
    return np.array([found[node] for node in sorted(found)], float).reshape(-1, 2)


def exchange_of(samples: list, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of the last exchange: seconds, and counts (samples, nodes, in/out).

    size: bytes of the exchange, in and out, over all nodes. The exchange ends when all counted bytes have passed, and
    begins `size` bytes earlier; the barriers before and after it send few bytes.
    """
    most = max((len(counts) for _, counts in samples), default=0)
    if not most:
        raise ValueError(f"{len(samples)} samples of no port: expected those of a virtual cluster: run it again")
    kept = [(seconds, counts) for seconds, counts in samples if len(counts) == most]
    seconds, counts = (np.array(column) for column in zip(*kept, strict=True))
    falls = np.flatnonzero((np.diff(counts, axis=0) < 0).any(axis=(1, 2)))  # a port that is being removed counts less
    stop = falls[0] + 1 if len(falls) else len(counts)
    seconds = seconds[:stop]
    counts = counts[:stop]
    passed = counts.sum(axis=(1, 2))
    begin = np.flatnonzero(passed <= passed[-1] - size * (1 - EDGE))
    end = np.flatnonzero(passed >= passed[-1] - size * EDGE)
    if not len(begin) or end[0] - begin[-1] < 2:
        counted = f"{passed[-1] - passed[0]:.0f} bytes in {len(kept)} samples"
        raise ValueError(f"the ports passed {counted}: expected an exchange of {size:.0f} bytes: run it again")
    return seconds[begin[-1] : end[0] + 1], counts[begin[-1] : end[0] + 1]


def in_pieces(seconds: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray]:
    """Cut the samples into pieces of about PIECE_S; return (seconds of a piece, bytes (pieces, nodes, in/out))."""
    pieces = max(1, round((seconds[-1] - seconds[0]) / PIECE_S))
    grid, piece_s = np.linspace(seconds[0], seconds[-1], pieces + 1, retstep=True)
    columns = [np.interp(grid, seconds, column) for column in counts.reshape(len(counts), -1).T]
    return float(piece_s), np.diff(columns, axis=1).T.reshape(pieces, *counts.shape[1:])
