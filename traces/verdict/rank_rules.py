"""Rules about ranks: one that computes slowly, uneven work, stalls, late data.

Each rule takes the evidence and returns its findings. Ranks are compared with the others in the same step; then the
median over the steps is taken. So effects on all ranks cancel, and so do random delays. Pipeline stages differ
by design: there a rank is compared with its stage, or with stages that have as many layers. A rank's place is its index
in run.ranks.
"""

import numpy as np

from traces.read.pipeline_times import shortest_forwards
from traces.record.phases import COMPUTE, COPY
from traces.units import seconds_text
from traces.verdict import thresholds
from traces.verdict.evidence import Evidence, Finding


def straggler(evidence: Evidence) -> list[Finding]:
    """Find one rank, or the ranks of one node, that compute longer than the others in almost every step."""
    groups = _slow_groups(evidence)
    run = evidence.run
    slow = [place for _, those in groups for place in those]
    nodes = {run.rank_nodes[place] for place in slow}
    if len(nodes) != 1:
        return []
    (node,) = nodes
    own_s = float(np.median(evidence.compute[:, slow]))
    lost_s = float(np.median(np.concatenate([_excess(evidence, *group) for group in groups], axis=1)))
    if len(slow) == 1:
        rank = run.rank_numbers[slow[0]]
        whom = "it"
        who = f"rank {rank} on {run.hosts[node]} computes"
    else:
        others = [place for group, _ in groups for place in group if len(group) > 1 and place not in slow]
        if node in {run.rank_nodes[place] for place in others}:
            return []
        rank = None
        whom = "them"
        numbers = " and ".join(str(run.rank_numbers[place]) for place in slow)
        who = f"ranks {numbers} on {run.hosts[node]} compute"
    others_s = own_s - lost_s
    headline = f"{who} {seconds_text(own_s)} a step, the others {seconds_text(others_s)}"
    text = f"{headline}, and all wait for {whom}: check that host's clock rate, cores and other jobs"
    phase = _longest_phase(evidence, slow[0])
    facts = {"compute_s": own_s, "others_compute_s": others_s}
    return [Finding("straggler", lost_s, headline, text, phase, node, rank, facts=facts)]


def _longest_phase(evidence: Evidence, place: int) -> str:
    """Return the phase in which a rank computes longest."""
    return max(("compute", "forward", "backward"), key=lambda name: np.median(evidence.times.phase(name)[:, place]))


def slow_ranks(evidence: Evidence) -> list[int]:
    """Return the indices of the ranks that compute longer than the others, by the thresholds."""
    return [place for _, slow in _slow_groups(evidence) for place in slow]


def _slow_groups(evidence: Evidence) -> list[tuple[np.ndarray, list[int]]]:
    """Return (workers with equal work, the slow ranks among them): the ranks of each stage.

    If none of these is slow, compare the ranks of all stages with equally many layers: a whole stage may be slow.
    """
    found = [(group, _slow_among(evidence, group)) for group in evidence.alike]
    if any(slow for _, slow in found):
        return found
    return [(group, _slow_across_stages(evidence, group)) for group in _alike_stages(evidence)]


def _alike_stages(evidence: Evidence) -> list[np.ndarray]:
    """Group the workers of stages with equally many layers, if there are FEWEST_ALIKE other such stages.

    Two stages cannot show which one is slow. The last stage is left out because it has the head, and the first one
    if its only forward sends the embedding.
    """
    pipeline = evidence.pipeline
    if pipeline is None or len(pipeline.layers) != len(evidence.alike):
        return []
    layers = np.array(pipeline.layers[:-1])
    first = 0 if pipeline.microbatches > 1 else 1
    stages = [np.flatnonzero(layers[first:] == count) + first for count in np.unique(layers[first:])]
    several = [some for some in stages if len(some) > thresholds.FEWEST_ALIKE]
    return [np.concatenate([evidence.alike[stage] for stage in some]) for some in several]


def _slow_among(evidence: Evidence, group: np.ndarray) -> list[int]:
    """Return the slow ranks of a group with equal work."""
    if len(group) < 2:
        return []
    ratio, excess = against_others(evidence.compute[:, group])
    return group[_stands_out(ratio) & (np.median(excess, axis=0) >= thresholds.LEAST_SHARE * evidence.step_s)].tolist()


def _slow_across_stages(evidence: Evidence, group: np.ndarray) -> list[int]:
    """Return the slow ranks of several stages, if their shortest forwards are slow too.

    Exchanging the embedding makes the first stage's backwards longer, and some of its forwards.
    """
    slow = _slow_among(evidence, group)
    if not slow:
        return []
    forwards = shortest_forwards(evidence.run, evidence.times)[:, group]
    late = group[_stands_out(against_others(forwards)[0])]
    return [place for place in slow if place in late]


def _stands_out(ratio: np.ndarray) -> np.ndarray:
    """Return (R,) bool from (S, R) ratios to the others: beyond chance, in almost every step."""
    usual = np.median(ratio, axis=0)
    # Two ranks alone show no usual deviation.
    deviation = 1.4826 * np.median(np.abs(usual - np.median(usual))) if len(usual) > 2 else 0.0
    enough = 1 + max(thresholds.SLOW_RANK - 1, thresholds.SLOW_RANK_DEVIATIONS * deviation)
    return (usual >= enough) & ((ratio > 1 + (thresholds.SLOW_RANK - 1) / 2).mean(axis=0) >= thresholds.ALMOST_ALWAYS)


def _excess(evidence: Evidence, group: np.ndarray, slow: list[int]) -> np.ndarray:
    """Return (S, slow) seconds by which the slow ranks compute longer than the others of their group."""
    others = evidence.compute[:, [place for place in group if place not in slow]]
    return evidence.compute[:, slow] - np.median(others, axis=1, keepdims=True) if slow else evidence.compute[:, []]


def against_others(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compare every rank with the median of the others in the step: (ratio, difference), each (S, R)."""
    others = seconds.shape[1] - 1
    order = np.argsort(seconds, axis=1)
    ranked = np.take_along_axis(seconds, order, 1)
    place = np.argsort(order, axis=1)
    # When a rank is taken out of the sorted row, the ranks after it move up by one.
    middle = [index + (index >= place) for index in ((others - 1) // 2, others // 2)]
    median = sum(np.take_along_axis(ranked, index, 1) for index in middle) / 2
    return seconds / np.maximum(median, 1e-9), seconds - median


def imbalance(evidence: Evidence) -> list[Finding]:
    """Find several ranks that compute much longer than the rest, all stages scaled to equal work."""
    if len(evidence.workers) < 2 or straggler(evidence):
        return []
    compute = with_equal_stages(evidence)
    medians = np.median(compute, axis=0)
    longest = float(medians.max())
    shortest = float(medians.min())
    heavy = medians > (longest + shortest) / 2
    lost_s = longest - float(medians.mean())
    apart = np.median(compute[:, heavy], axis=1) / np.median(compute[:, ~heavy], axis=1) if heavy.any() else np.ones(1)
    half_way = 1 + (thresholds.UNEVEN - 1) / 2
    is_even = np.median(apart) < thresholds.UNEVEN or (apart > half_way).mean() < thresholds.ALMOST_ALWAYS
    if is_even or heavy.sum() < 2 or lost_s < thresholds.LEAST_SHARE * evidence.step_s:
        return []
    ranks = ", ".join(str(evidence.run.rank_numbers[place]) for place in evidence.workers[heavy])
    text = f"work is uneven: ranks {ranks} compute up to {seconds_text(longest)} a step, the fastest rank "
    text += f"{seconds_text(shortest)}: give all ranks equal work and equal cores"
    headline = f"work is uneven: ranks compute {seconds_text(shortest)} to {seconds_text(longest)} a step"
    facts = {"longest_compute_s": longest, "shortest_compute_s": shortest}
    phase = _longest_phase(evidence, evidence.workers[heavy][0])
    return [Finding("imbalance", lost_s, headline, text, phase, facts=facts)]


def with_equal_stages(evidence: Evidence) -> np.ndarray:
    """Return (S, W) seconds that the workers compute, scaled so that all stages have the mean stage's work."""
    usual = [float(np.median(evidence.compute[:, group])) for group in evidence.alike]
    factor = np.ones(len(evidence.run.ranks))
    for group, seconds in zip(evidence.alike, usual, strict=True):
        factor[group] = np.mean(usual) / max(seconds, 1e-9)
    return (evidence.compute * factor)[:, evidence.workers]


def stalls(evidence: Evidence) -> list[Finding]:
    """Find a rank that stalls now and then. Only regular steps count: slow ones were traced because they are slow."""
    regular = evidence.regular
    steps = int(regular.sum())
    excess = np.zeros_like(evidence.own)
    excess[regular] = stall_seconds(evidence.own[regular], evidence.step_s)
    total = excess.sum(axis=0)
    count = (excess > 0).sum(axis=0)
    place = int(np.argmax(total))
    if count[place] < thresholds.FEWEST_STALLS or total[place] < thresholds.MOST_OF_STALLS * total.sum():
        return []
    lost_s = float(total[place]) / steps
    if lost_s < thresholds.LEAST_STALL_SHARE * evidence.step_s:
        return []
    rank = evidence.run.rank_numbers[place]
    node = evidence.run.rank_nodes[place]
    phase = _stalled_phase(evidence, place, excess[:, place] > 0)
    every = steps / count[place]
    length_s = float(total[place] / count[place])
    who = f"rank {rank} on {evidence.run.hosts[node]}"
    text = f"{who} stalls once in {every:.0f} steps for {seconds_text(length_s)}{f' in {phase}' if phase else ''}, "
    text += "and all wait for it: look for other processes on that host"
    facts = {"stalls": int(count[place]), "steps": steps, "stall_s": length_s}
    kind = "data" if phase == "data" else "straggler"
    what = "waits now and then for its data," if kind == "data" else "stalls now and then for"
    headline = f"{who} {what} {seconds_text(length_s)}"
    return [Finding(kind, lost_s, headline, text, phase, node, rank, facts=facts)]


def stall_seconds(own: np.ndarray, step_s: float) -> np.ndarray:
    """Return (S, R) seconds by which a rank's own time in a step exceeds its median; 0 unless it is a stall.

    Time that all ranks lose in the same step does not count.
    """
    excess = own - np.median(own, axis=0)
    excess = excess - (np.maximum(0.0, np.median(excess, axis=1, keepdims=True)) if own.shape[1] > 2 else 0.0)
    deviation = 1.4826 * np.median(np.abs(excess))
    return np.where(excess > max(thresholds.STALL * step_s, thresholds.STALL_DEVIATIONS * deviation), excess, 0.0)


def _stalled_phase(evidence: Evidence, place: int, stalled: np.ndarray) -> str | None:
    """Return the phase that is longer in the stalled steps; None if the stall is outside all phases."""
    longer = {
        name: float(np.mean(seconds[stalled]) - np.median(seconds))
        for name in ("data", *COMPUTE, *COPY)
        for seconds in [evidence.times.phase(name)[:, place]]
    }
    longest = max(longer, key=longer.get)
    outside = float(np.mean(evidence.own[stalled, place]) - np.median(evidence.own[:, place])) - sum(longer.values())
    return longest if longer[longest] > outside else None


def data(evidence: Evidence) -> list[Finding]:
    """Find data that arrive late: on one rank or node that the others wait for, or on the mean rank."""
    if not len(evidence.workers):
        return []
    run = evidence.run
    seconds = evidence.times.phase("data")[:, evidence.workers]
    late = []
    if seconds.shape[1] > 1:
        lost = np.median(against_others(seconds)[1], axis=0)
        is_late = lost >= thresholds.LEAST_SHARE * evidence.step_s
        late = evidence.workers[is_late].tolist()
        others_nodes = {run.rank_nodes[place] for place in evidence.workers[~is_late]}
        nodes = {run.rank_nodes[place] for place in late}
        if len(late) == 1 or (len(nodes) == 1 and others_nodes and not nodes & others_nodes):
            return [_late_data(evidence, late, float(lost.max()), float(np.median(seconds[:, ~is_late])))]
    slowest_s = float(np.median(seconds.max(axis=1)))
    if np.median(seconds, axis=0).mean() < thresholds.DATA_ON_ALL * evidence.step_s:
        return []
    where = f"ranks {', '.join(str(run.rank_numbers[place]) for place in late)}" if late else "every rank"
    text = f"reading data takes {seconds_text(slowest_s)} of a {seconds_text(evidence.step_s)} step on {where}: put"
    text += " the shards on a faster file system, or on local disks"
    headline = f"reading data takes {evidence.share(slowest_s)}"
    return [Finding("data", slowest_s, headline, text, "data", facts={"data_s": slowest_s})]


def _late_data(evidence: Evidence, late: list[int], lost_s: float, typical_s: float) -> Finding:
    """Return the finding of one late rank, or of all ranks of a node."""
    rank = evidence.run.rank_numbers[late[0]] if len(late) == 1 else None
    node = evidence.run.rank_nodes[late[0]]
    own_s = lost_s + typical_s
    who = f"rank {rank} on {evidence.run.hosts[node]} waits" if len(late) == 1 else f"{evidence.run.hosts[node]} waits"
    headline = f"{who} {seconds_text(own_s)} a step for its data"
    text = f"{headline}, the others {seconds_text(typical_s)}: check that host's file system"
    facts = {"data_s": own_s, "others_data_s": typical_s}
    return Finding("data", lost_s, headline, text, "data", node, rank, facts=facts)
