"""Is it a rank that stands still? Stalls now and then, and data that come late.

Each rule takes the evidence and returns its findings.
"""

import numpy as np

from traces.verdict.evidence import Evidence
from traces.verdict.findings import Finding, seconds_text
from traces.verdict.rank_rules import LEAST_SHARE, against_others

# A stall is longer than this part of a step, and than so many of the rank's usual deviations.
STALL, DEVIATIONS = 0.3, 6.0
FEWEST_STALLS, MOST_OF_STALLS = 2, 0.6
LEAST_STALL_SHARE = 0.02
DATA_ON_ALL = 0.25  # of a step


def stalls(evidence: Evidence) -> list[Finding]:
    """A rank that is held up now and then: medians do not show it, all wait for it in those steps."""
    steps, ranks = evidence.own.shape
    excess = stall_seconds(evidence.own, evidence.step_s)
    total, count = excess.sum(axis=0), (excess > 0).sum(axis=0)
    place = int(np.argmax(total))
    lost_s = float(total[place]) / steps
    is_one_ranks = ranks == 1 or total[place] >= MOST_OF_STALLS * total.sum()
    if count[place] < FEWEST_STALLS or not is_one_ranks or lost_s < LEAST_STALL_SHARE * evidence.step_s:
        return []
    rank, node = evidence.rank_numbers[place], evidence.rank_nodes[place]
    phase = _stalled_phase(evidence, place, excess[:, place] > 0)
    every, length_s = steps / count[place], float(total[place] / count[place])
    return [
        Finding(
            "data" if phase == "data" else "straggler", lost_s,
            f"rank {rank} on {evidence.host(node)} stalls once in {every:.0f} steps for {seconds_text(length_s)}"
            f"{f' in {phase}' if phase else ''}, and all wait for it: look for what else runs there",
            phase, node, rank, facts={"stalls": int(count[place]), "steps": steps, "stall_s": length_s},
        )
    ]  # fmt: skip


def stall_seconds(own: np.ndarray, step_s: float) -> np.ndarray:
    """(S, R): by how much a rank's own time in a step is beyond its median, 0 unless it is a stall.

    What all ranks share in that step is taken off first.
    """
    excess = own - np.median(own, axis=0)
    excess = excess - (np.maximum(0.0, np.median(excess, axis=1, keepdims=True)) if own.shape[1] > 2 else 0.0)
    deviation = 1.4826 * np.median(np.abs(excess))
    return np.where(excess > max(STALL * step_s, DEVIATIONS * deviation), excess, 0.0)


def _stalled_phase(evidence: Evidence, place: int, stalled: np.ndarray) -> str | None:
    """The phase that is longer in the stalled steps; None where it is outside all phases."""
    names = ("data", "forward", "backward", "update", "copy_out", "copy_in")
    longer = {
        name: float(np.mean(seconds[stalled]) - np.median(seconds))
        for name in names
        for seconds in [evidence.phase(name)[:, place]]
    }
    longest = max(longer, key=longer.get)
    outside = float(np.mean(evidence.own[stalled, place]) - np.median(evidence.own[:, place])) - sum(longer.values())
    return longest if longer[longest] > outside else None


def data(evidence: Evidence) -> list[Finding]:
    """Reading data takes a share of the step: on one rank, so that the others wait, or on all."""
    if not len(evidence.workers):
        return []
    seconds = evidence.phase("data")[:, evidence.workers]
    typical_s = float(np.median(seconds))
    if seconds.shape[1] > 1:
        _, excess = against_others(seconds)
        lost = np.median(excess, axis=0)
        late = evidence.workers[lost >= LEAST_SHARE * evidence.step_s].tolist()
        if len(late) == 1:
            return [_starved(evidence, late[0], float(lost.max()), typical_s)]
    slowest_s = float(np.median(seconds.max(axis=1)))
    if np.median(seconds, axis=0).mean() < DATA_ON_ALL * evidence.step_s:
        return []
    return [
        Finding(
            "data", slowest_s,
            f"reading data takes {seconds_text(slowest_s)} of a {seconds_text(evidence.step_s)} step on every rank: "
            f"put the shards on a faster file system, or nearer",
            "data", facts={"data_s": slowest_s},
        )
    ]  # fmt: skip


def _starved(evidence: Evidence, place: int, lost_s: float, typical_s: float) -> Finding:
    rank, node = evidence.rank_numbers[place], evidence.rank_nodes[place]
    return Finding(
        "data", lost_s,
        f"rank {rank} on {evidence.host(node)} waits {seconds_text(lost_s + typical_s)} a step for its data, the "
        f"others {seconds_text(typical_s)}: check that host's file system",
        "data", node, rank, facts={"data_s": lost_s + typical_s, "others_data_s": typical_s},
    )  # fmt: skip
