"""Is it a rank? One that computes slowly, uneven work, stalls now and then, data that come late.

Each rule takes the evidence and returns its findings. Ranks are compared with the others in the same step, then the
median over steps is taken: what slows all ranks (other jobs on the machine) cancels, and chance does not repeat.
Stages of a pipeline differ by design: there a rank's others are those of its stage, or of stages with as many layers.
"""

import numpy as np

from traces.read.pipeline import shortest_forwards
from traces.record.phases import COMPUTE, COPY
from traces.units import seconds_text
from traces.verdict.evidence import Evidence, Finding

SLOW = 1.12  # times the others' time
CHANCE = 4.0  # so many deviations of the ranks among each other are chance
UNEVEN = 1.25  # the median time of several ranks over that of the rest
FEWEST_ALIKE = 2  # other stages that have as much to do
ALMOST_ALWAYS = 0.75  # of the steps
LEAST_SHARE = 0.05  # of a step: what is worth naming a rank for
# A stall is longer than this part of a step, and than so many of the rank's usual deviations.
STALL, DEVIATIONS = 0.3, 6.0
FEWEST_STALLS, MOST_OF_STALLS = 2, 0.6
LEAST_STALL_SHARE = 0.02
DATA_ON_ALL = 0.25  # of a step


def straggler(evidence: Evidence) -> list[Finding]:
    """One rank, or the ranks of one node, compute longer than the others in almost every step."""
    groups, run = _slow_groups(evidence), evidence.run
    slow = [place for _, those in groups for place in those]
    nodes = {run.rank_nodes[place] for place in slow}
    if len(nodes) != 1:
        return []
    node, own_s = nodes.pop(), float(np.median(evidence.compute[:, slow]))
    lost_s = float(np.median(np.concatenate([_excess(evidence, *group) for group in groups], axis=1)))
    if len(slow) == 1:
        rank, whom = run.rank_numbers[slow[0]], "it"
        who = f"rank {rank} on {run.hosts[node]} computes"
    else:
        others = [place for group, _ in groups for place in group if len(group) > 1 and place not in slow]
        if node in {run.rank_nodes[place] for place in others}:
            return []
        rank, whom = None, "them"
        numbers = " and ".join(str(run.rank_numbers[place]) for place in slow)
        who = f"the ranks of {run.hosts[node]} ({numbers}) compute"
    others_s = own_s - lost_s
    text = f"{who} {seconds_text(own_s)} a step, the others {seconds_text(others_s)}, and all wait for {whom}: "
    text += "check that host's clock rate, cores and other jobs"
    phase = max(("compute", "forward", "backward"), key=lambda name: np.median(evidence.phase(name)[:, slow[0]]))
    facts = {"compute_s": own_s, "others_compute_s": others_s}
    return [Finding("straggler", lost_s, text, phase, node, rank, facts=facts)]


def slow_ranks(evidence: Evidence) -> list[int]:
    """Indices of the ranks whose computing takes longer than the others', by so much and so often that it counts."""
    return [place for _, slow in _slow_groups(evidence) for place in slow]


def _slow_groups(evidence: Evidence) -> list[tuple[np.ndarray, list[int]]]:
    """Groups of workers that have as much to do as each other, and who of each is slow.

    The ranks of each stage; if nobody is slow among them, those of stages with as many layers: a whole stage may be.
    """
    found = [(group, _slow_among(evidence, group)) for group in evidence.alike]
    if any(slow for _, slow in found):
        return found
    return [(group, _slow_across_stages(evidence, group)) for group in _alike_stages(evidence)]


def _alike_stages(evidence: Evidence) -> list[np.ndarray]:
    """The workers of all stages with as many layers, where there are FEWEST_ALIKE others: of two, nobody knows which is
    slow. Without the last stage, which has the head; and the first one, where its only forward sends the embedding."""
    pipeline = evidence.pipeline
    if pipeline is None or len(pipeline.layers) != len(evidence.alike):
        return []
    layers, first = np.array(pipeline.layers[:-1]), 0 if pipeline.micro_steps > 1 else 1
    stages = [np.flatnonzero(layers[first:] == count) + first for count in np.unique(layers[first:])]
    return [np.concatenate([evidence.alike[stage] for stage in some]) for some in stages if len(some) > FEWEST_ALIKE]


def _slow_among(evidence: Evidence, group: np.ndarray) -> list[int]:
    """Those of a group that has equal work."""
    if len(group) < 2:
        return []
    ratio, excess = against_others(evidence.compute[:, group])
    return group[_stands_out(ratio) & (np.median(excess, axis=0) >= LEAST_SHARE * evidence.step_s)].tolist()


def _slow_across_stages(evidence: Evidence, group: np.ndarray) -> list[int]:
    """Those that are slow in their forwards, too. The first stage's embedding makes its backwards longer, and those
    forwards during which it is sent to the last stage: so the shortest forward of a step counts."""
    slow = _slow_among(evidence, group)
    if not slow:
        return []
    forwards = shortest_forwards(evidence.run, evidence.times)[:, group]
    late = group[_stands_out(against_others(forwards)[0])]
    return [place for place in slow if place in late]


def _stands_out(ratio: np.ndarray) -> np.ndarray:
    """(R,) bool, of (S, R) ratios to the others of a group: beyond chance, in almost every step."""
    usual = np.median(ratio, axis=0)
    # Two ranks differ from each other and from nobody else.
    deviation = 1.4826 * np.median(np.abs(usual - np.median(usual))) if len(usual) > 2 else 0.0
    enough = 1 + max(SLOW - 1, CHANCE * deviation)
    return (usual >= enough) & ((ratio > 1 + (SLOW - 1) / 2).mean(axis=0) >= ALMOST_ALWAYS)


def _excess(evidence: Evidence, group: np.ndarray, slow: list[int]) -> np.ndarray:
    """(S, slow) seconds by which those compute longer than the others of their group, in each step."""
    others = evidence.compute[:, [place for place in group if place not in slow]]
    return evidence.compute[:, slow] - np.median(others, axis=1, keepdims=True) if slow else evidence.compute[:, []]


def against_others(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ratio, excess), each (S, R): every rank's seconds over, and beyond, the median of the others in that step."""
    others = seconds.shape[1] - 1
    order = np.argsort(seconds, axis=1)
    ranked, place = np.take_along_axis(seconds, order, 1), np.argsort(order, axis=1)
    # Where a rank is taken out of the sorted row, those after it move up by one.
    middle = [index + (index >= place) for index in ((others - 1) // 2, others // 2)]
    median = sum(np.take_along_axis(ranked, index, 1) for index in middle) / 2
    return seconds / np.maximum(median, 1e-9), seconds - median


def imbalance(evidence: Evidence) -> list[Finding]:
    """Several ranks compute much longer than several others of their stage, in almost every step."""
    if len(evidence.workers) < 2 or straggler(evidence):
        return []
    compute = with_equal_stages(evidence)
    medians = np.median(compute, axis=0)
    middle = (medians.max() + medians.min()) / 2
    heavy = medians > middle
    lost_s = float(medians.max() - medians.mean())
    apart = np.median(compute[:, heavy], axis=1) / np.median(compute[:, ~heavy], axis=1) if heavy.any() else np.ones(1)
    is_steady = (apart > 1 + (UNEVEN - 1) / 2).mean() >= ALMOST_ALWAYS and np.median(apart) >= UNEVEN
    if not is_steady or heavy.sum() < 2 or lost_s < LEAST_SHARE * evidence.step_s:
        return []
    ranks = ", ".join(str(evidence.run.rank_numbers[place]) for place in evidence.workers[heavy])
    longest, shortest = float(medians.max()), float(medians.min())
    text = f"work is uneven: ranks {ranks} compute up to {seconds_text(longest)} a step, the least "
    text += f"{seconds_text(shortest)}; give all ranks equal work and equal cores"
    facts = {"longest_compute_s": longest, "shortest_compute_s": shortest}
    return [Finding("imbalance", lost_s, text, "backward", facts=facts)]


def with_equal_stages(evidence: Evidence) -> np.ndarray:
    """(S, W) seconds that the workers compute, those of each stage brought to the mean stage's: that one stage has more
    work than another is no matter of its ranks."""
    usual = [float(np.median(evidence.compute[:, group])) for group in evidence.alike]
    factor = np.ones(len(evidence.run.ranks))
    for group, seconds in zip(evidence.alike, usual, strict=True):
        factor[group] = np.mean(usual) / max(seconds, 1e-9)
    return (evidence.compute * factor)[:, evidence.workers]


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
    rank, node = evidence.run.rank_numbers[place], evidence.run.rank_nodes[place]
    phase = _stalled_phase(evidence, place, excess[:, place] > 0)
    every, length_s = steps / count[place], float(total[place] / count[place])
    text = f"rank {rank} on {evidence.run.hosts[node]} stalls once in {every:.0f} steps for {seconds_text(length_s)}"
    text += f"{f' in {phase}' if phase else ''}, and all wait for it: look for what else runs there"
    facts = {"stalls": int(count[place]), "steps": steps, "stall_s": length_s}
    return [Finding("data" if phase == "data" else "straggler", lost_s, text, phase, node, rank, facts=facts)]


def stall_seconds(own: np.ndarray, step_s: float) -> np.ndarray:
    """(S, R): by how much a rank's own time in a step is beyond its median, 0 unless it is a stall.

    What all ranks share in that step is taken off first.
    """
    excess = own - np.median(own, axis=0)
    excess = excess - (np.maximum(0.0, np.median(excess, axis=1, keepdims=True)) if own.shape[1] > 2 else 0.0)
    deviation = 1.4826 * np.median(np.abs(excess))
    return np.where(excess > max(STALL * step_s, DEVIATIONS * deviation), excess, 0.0)


def _stalled_phase(evidence: Evidence, place: int, stalled: np.ndarray) -> str | None:
    """Return the phase that is longest in stalled steps, or None if the time is lost outside all phases."""
    longer = {
        name: float(np.mean(seconds[stalled]) - np.median(seconds))
        for name in ("data", *COMPUTE, *COPY)
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
            rank, node = evidence.run.rank_numbers[late[0]], evidence.run.rank_nodes[late[0]]
            own_s = float(lost.max()) + typical_s
            text = f"rank {rank} on {evidence.run.hosts[node]} waits {seconds_text(own_s)} a step for its data, the "
            text += f"others {seconds_text(typical_s)}: check that host's file system"
            facts = {"data_s": own_s, "others_data_s": typical_s}
            return [Finding("data", float(lost.max()), text, "data", node, rank, facts=facts)]
    slowest_s = float(np.median(seconds.max(axis=1)))
    if np.median(seconds, axis=0).mean() < DATA_ON_ALL * evidence.step_s:
        return []
    text = f"reading data takes {seconds_text(slowest_s)} of a {seconds_text(evidence.step_s)} step on every rank: "
    text += "put the shards on a faster file system, or nearer"
    return [Finding("data", slowest_s, text, "data", facts={"data_s": slowest_s})]
