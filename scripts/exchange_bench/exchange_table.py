"""Summarize each contender's repetitions, and format the table that bench_exchange.py prints."""

import statistics

import numpy as np

from scripts.bench.turns import spread
from traces.units import count_text
from traces.verdict.summary import aligned


def lower_bound_s(size_bytes: int, nodes: int, rate: float | None) -> float | None:
    """Return 2 (M-1)/M D / B, the shortest possible seconds of an all-reduce of D bytes; None on one node.

    Each of M nodes must send and receive 2 (M-1)/M D bytes through a port of B bytes/s each way.
    """
    return 2 * (nodes - 1) / nodes * size_bytes / rate if nodes > 1 else None


def summarize(contender, repetitions: list[dict], size_bytes: int, ranks: int, bound_s: float | None) -> dict:
    """Return a contender's figures, which are medians unless their names say otherwise.

    algbw: bytes of the float32 vector per second, whatever the wire format. busbw: algbw times 2 (N-1)/N for a whole
    exchange, times 1 for Reduce and Bcast (nccl-tests, doc/PERFORMANCE.md).
    """
    seconds = spread([repetition["seconds"] for repetition in repetitions])
    median = seconds["median"]
    algbw = size_bytes / median
    return {
        "family": contender.family,
        "wire": contender.wire,
        "whole": contender.whole,
        "seconds": seconds,
        "times_bound": median / bound_s if bound_s else None,
        "algbw": algbw,
        "busbw": algbw * (2 * (ranks - 1) / ranks if contender.whole else 1),
        "cpu_s": statistics.median(repetition["cpu_s"] for repetition in repetitions),
        # [in, out] of each node; every number is a median of its own.
        "node_bytes": np.median([one["node_bytes"] for one in repetitions], axis=0).astype(int).tolist(),
        "repetitions": repetitions,
    }


def table(report: dict, size: dict) -> str:
    """Return a header and a line per contender, fastest first."""
    contenders = dict(sorted(size["contenders"].items(), key=lambda item: item[1]["seconds"]["median"]))
    parts = [head_lines(report, size), aligned(_rows(size, contenders))]
    if any(not one["whole"] for one in contenders.values()):
        parts.append("MPI_Reduce and MPI_Bcast alone are each half of an exchange.")
    return "\n\n".join(parts)


def head_lines(report: dict, size: dict) -> str:
    place = f"{report['ranks']} ranks on {count_text(report['nodes'], 'node')}"
    text = f"{size['bytes'] / 1e6:.4g} MB of float32, {place}, median of {report['settings']['repeat']}: "
    if size["bound_s"] is None:
        return f"{text}one node, so no network and no bound"
    link = report["link"]
    probed = "the slowest port as probed, both ways at once; give --link for the nominal"
    source = "nominal" if link["nominal"] else probed
    rate = f"{link['bytes_per_s'] * 8 / 1e6:,.0f} Mbit/s each way ({source})"
    return f"{text}bound {size['bound_s'] * 1e3:.1f} ms\nlink {rate}"


def _rows(size: dict, contenders: dict) -> list[list[str]]:
    """Return the column titles and the cells of each contender."""
    has_network = size["bound_s"] is not None
    bound = ["x bound"] if has_network else []
    busiest = ["max in, MB", "max out"] if has_network else []
    rows = [["", "median, ms", "min", "max", *bound, "algbw, GB/s", "busbw", *busiest, "CPU, ms"]]
    for name, one in contenders.items():
        times = [f"{one['seconds'][key] * 1e3:.1f}" for key in ("median", "min", "max")]
        if has_network:
            bound = [f"{one['times_bound']:.3f}"]
            busiest = [f"{max(ways) / 1e6:.2f}" for ways in zip(*one["node_bytes"], strict=True)]
        rates = [f"{one['algbw'] / 1e9:.4f}", f"{one['busbw'] / 1e9:.4f}"]
        rows.append([name, *times, *bound, *rates, *busiest, f"{one['cpu_s'] * 1e3:.0f}"])
    return rows
