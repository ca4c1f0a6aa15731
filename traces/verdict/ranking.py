"""Several runs side by side: which is fastest, how to say so, and the table of their medians."""

from traces.record.phases import PHASES

# The control that exchanges nothing is a yardstick, not a choice.
CONTROL = "none"
# Runs whose tokens per step differ by less have the same batch.
SAME_BATCH = 0.01


def slowness(figures: dict, runs: list[dict]) -> float:
    """What the runs are ranked by, small is fast: ms per step; seconds per token where their batches differ."""
    return figures["step_ms"] if same_batch(runs) else 1 / figures["tokens_per_s"]


def same_batch(runs: list[dict]) -> bool:
    """Whether the summaries' runs trained on equally many tokens a step (taken as true where a log has no rates)."""
    tokens = [figures["tokens_per_step"] for figures in runs]
    return None in tokens or max(tokens) - min(tokens) <= SAME_BATCH * max(tokens)


def from_slow_to_fast(runs: list[dict]) -> list[dict]:
    """The summaries of the runs that trained (all but the control), the slowest first."""
    trained = [figures for figures in runs if figures["strategy"] != CONTROL]
    return sorted(trained, key=lambda figures: -slowness(figures, runs))


def speed_text(figures: dict, runs: list[dict]) -> str:
    """How fast a run was, in the unit of the ranking: "41 ms a step" or "51,200 tokens/s"."""
    return (
        f"{short_ms(figures['step_ms'])} ms a step" if same_batch(runs) else f"{figures['tokens_per_s']:,.0f} tokens/s"
    )


def verdict(runs: list[dict]) -> str:
    """One sentence: the fastest of several runs and by how much, or where one run's time goes."""
    ranked = from_slow_to_fast(runs)
    if len(ranked) < 2:
        figures = (ranked or runs)[0]
        return f"{figures['label']}: {speed_text(figures, runs)}, {figures['exchange_share']:.0%} of it exchange"
    slowest, fastest = ranked[0], ranked[-1]
    ratio = slowness(slowest, runs) / slowness(fastest, runs)
    if ratio < 1.02:
        return f"no difference: {fastest['label']} and {slowest['label']} both take {speed_text(fastest, runs)}"
    return f"fastest: {fastest['label']}, {speed_text(fastest, runs)} ({ratio_text(ratio)} than {slowest['label']})"


def ratio_text(ratio: float) -> str:
    """ "1.8 times faster", "8% faster"."""
    return f"{ratio:.1f} times faster" if ratio >= 1.2 else f"{ratio - 1:.0%} faster"


def short_ms(ms: float, digits: int = 2) -> str:
    """Milliseconds in `digits` digits, more only before the point: 0.4, 4.2, 42, 421."""
    return f"{ms:.{max(0, digits - len(str(int(ms))))}f}"


def mfu_text(mfu: float) -> str:
    """A fraction in two digits: "46%", "4.6%"."""
    return f"{short_ms(100 * mfu)}%"


def table(runs: list[dict], parts: list[dict[str, float]]) -> str:
    """Text table, one line a run: ms per part of the step, their sum, the share of exchange, tokens per second, MFU
    where it is known of any run."""
    names = [name for name in (*PHASES, "waiting", "other") if any(name in cut for cut in parts)]
    rows = [["median ms", *names, "step", "exchange", "tokens/s", "MFU"]]
    for figures, cut in zip(runs, parts, strict=True):
        times = [short_ms(cut[name], 3) if name in cut else "-" for name in names]
        rate = "-" if figures["tokens_per_s"] is None else f"{figures['tokens_per_s']:,.0f}"
        mfu = "-" if figures["mfu"] is None else mfu_text(figures["mfu"])
        share = f"{figures['exchange_share']:.0%}"
        rows.append([figures["label"], *times, short_ms(figures["step_ms"], 3), share, rate, mfu])
    if all(figures["mfu"] is None for figures in runs):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: list[str], widths: list[int]) -> str:
    cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join(cells)
