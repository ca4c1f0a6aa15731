"""Rank several runs: which one is fastest, and whether that is more than noise.

Where each strategy was trained several times in turn (scripts/compare.py), its speed is the median over these rounds,
and the differences between rounds are the noise. A run is the fastest if each of its rounds is faster than every round
of every other run, and its median by LEAST_DIFFERENCE. Otherwise it ties with all runs that it does not beat. This
assumes no distribution: if all runs are equally fast, every order of their rounds is equally likely. `chance` is the
probability that one of them is named nevertheless.
"""

import math
from dataclasses import replace

import numpy as np

from traces.units import count_text, listed, ratio_text, short_ms
from traces.verdict.summary import TimedRun

SAME_BATCH = 0.01  # runs whose tokens per step differ by less have the same batch
LEAST_DIFFERENCE = 1.02  # a smaller ratio is no reason to choose another strategy, even if it is certain
MOST_NAMED = 3
# The numbers of a summary that are medians; all others are the same in every round.
OF_PARTS = ("phases_ms", "waiting_ms")
OF_ROUNDS = ("step_ms", "exchanging_share", "tokens_per_s", "tokens_per_step", "mfu")


def merge_rounds(rounds: list[TimedRun], label: str) -> TimedRun:
    """Merge runs with equal settings into one, with the medians over these rounds.

    figures: as in `summary`, and "rounds", the figures of each round. run, times and diagnosis come from the round
    nearest to the medians. The log is from the first round, which has the validation loss.
    """
    each = [one.figures for one in rounds]
    found = {name: _median([figures[name] for figures in each]) for name in OF_ROUNDS}
    for name in OF_PARTS:
        parts = dict.fromkeys(part for figures in each for part in figures[name])
        found[name] = {part: _median([figures[name].get(part, 0.0) for figures in each]) for part in parts}
    found["other_ms"] = max(0.0, found["step_ms"] - sum(found["phases_ms"].values()))
    nearest = min(rounds, key=lambda one: abs(one.figures["step_ms"] - found["step_ms"]))
    run = replace(nearest.run, log=rounds[0].run.log)
    return TimedRun(run, nearest.times, nearest.figures | found | {"label": label, "rounds": each}, nearest.diagnosis)


def _median(values: list[float | None]) -> float | None:
    return None if None in values else float(np.median(values))


def slowness(figures: dict, runs: list[dict]) -> float:
    """Return the number by which runs are ranked, small is fast: ms per step; seconds per token if batches differ."""
    return figures["step_ms"] if same_batch(runs) else 1 / figures["tokens_per_s"]


def same_batch(runs: list[dict]) -> bool:
    """Return whether the runs trained on equally many tokens a step. Assumed if a log has no rates."""
    tokens = [figures["tokens_per_step"] for figures in runs]
    return None in tokens or max(tokens) - min(tokens) <= SAME_BATCH * max(tokens)


def from_slow_to_fast(runs: list[dict]) -> list[dict]:
    """Return the summaries of the runs whose ranks trained one model together, the slowest first."""
    trained = [figures for figures in runs if figures["exchanges"]]
    return sorted(trained, key=lambda figures: -slowness(figures, runs))


def fastest(runs: list[dict]) -> list[dict]:
    """Return the fastest run, and in a tie all runs that it does not beat, the fastest first."""
    best, *others = reversed(from_slow_to_fast(runs))
    return [best, *(other for other in others if not is_faster(best, other, runs))]


def is_faster(one: dict, other: dict, runs: list[dict]) -> bool:
    """Return whether each round of `one` is faster than each of `other`, and the median by LEAST_DIFFERENCE."""
    its, others = (slownesses(figures, runs) for figures in (one, other))
    return max(its) < min(others) and slowness(other, runs) >= LEAST_DIFFERENCE * slowness(one, runs)


def slownesses(figures: dict, runs: list[dict]) -> list[float]:
    """Return the slowness of each round."""
    return [slowness(one, runs) for one in figures.get("rounds", [figures])]


def chance(runs: int, rounds: int) -> float:
    """Return the probability that the rule names one of several equally fast runs: its rounds happen to be fastest."""
    return runs / math.comb(runs * rounds, rounds)


def speed_text(figures: dict, runs: list[dict]) -> str:
    """Return a run's speed in the unit of the ranking: "41 ms a step" or "51,200 tokens/s"."""
    return (
        f"{short_ms(figures['step_ms'])} ms a step" if same_batch(runs) else f"{figures['tokens_per_s']:,.0f} tokens/s"
    )


def verdict(runs: list[dict]) -> str:
    """Say in one sentence which of several runs is fastest and by how much, or that they tie; of one run, its speed."""
    ranked = from_slow_to_fast(runs)
    if len(ranked) < 2:
        figures = (ranked or runs)[0]
        return f"{figures['label']}: {speed_text(figures, runs)}"
    slowest = ranked[0]
    best = ranked[-1]
    tied = fastest(runs)
    if slowness(slowest, runs) < LEAST_DIFFERENCE * slowness(best, runs):
        return f"no difference: {best['label']} and {slowest['label']} both take {speed_text(best, runs)}"
    if len(tied) > 1:
        return f"a tie: {tie_text(tied, runs)}"
    ratio = slowness(slowest, runs) / slowness(best, runs)
    return f"fastest: {best['label']}, {speed_text(best, runs)} ({ratio_text(ratio)} than {slowest['label']})"


def tie_text(tied: list[dict], runs: list[dict]) -> str:
    """Return "ring and tree, 41 and 43 ms a step"; of more than MOST_NAMED runs, the fastest ones."""
    labels = [figures["label"] for figures in tied[:MOST_NAMED]]
    speeds = [speed_text(figures, runs) for figures in tied[:MOST_NAMED]]
    speeds = [*(speed.partition(" ")[0] for speed in speeds[:-1]), speeds[-1]]
    more = [f"{len(tied) - MOST_NAMED} more"] if tied[MOST_NAMED:] else []
    return f"{listed(labels + more)}, {listed(speeds)}"


def grounds(runs: list[dict]) -> str:
    """Return the grounds of the verdict as a sentence; "" for a single run."""
    ranked = from_slow_to_fast(runs)
    if len(ranked) < 2:
        return ""
    rounds = min(len(slownesses(figures, runs)) for figures in ranked)
    tied = fastest(runs)
    if rounds == 1:
        return "One run each: a second one may differ"
    if len(tied) > 1:
        return f"{count_text(rounds, 'round')}: {_overlaps(tied, runs)}"
    once = f"if all were equally fast, that would happen by chance once in {1 / chance(len(ranked), rounds):.0f} times"
    return f"All {rounds} rounds of it are faster than any round of the others; {once}"


def _overlaps(tied: list[dict], runs: list[dict]) -> str:
    best, *others = tied
    is_ms = same_batch(runs)
    if all(max(slownesses(best, runs)) < min(slownesses(other, runs)) for other in others):
        return f"less than {LEAST_DIFFERENCE - 1:.0%} apart"
    spreads = []
    for figures in tied[:MOST_NAMED]:
        times = [one["step_ms"] for one in figures["rounds"]]
        speeds = [one["tokens_per_s"] for one in figures["rounds"]]
        spreads.append(" to ".join(short_ms(end(times)) if is_ms else f"{end(speeds):,.0f}" for end in (min, max)))
    slower = [figures["label"] for figures in reversed(from_slow_to_fast(runs)) if figures not in tied]
    ends = f"they overlap ({', '.join(spreads)} {'ms' if is_ms else 'tokens/s'})"
    return f"{ends}; {listed(slower)} {'is' if len(slower) == 1 else 'are'} slower" if slower else ends
