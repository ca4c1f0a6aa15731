"""The verdict on a run: what holds its steps up, from rules that each look for one thing.

Faults of one rank or port come first, the costliest of them: they can be repaired, and they make everything else look
bad too. Without one the verdict is what the step consists of: a server's port, all ports, latency, data or computing.
"""

from dataclasses import dataclass

import numpy as np

from traces import network_rules, rank_rules
from traces.analysis import StepTimes
from traces.evidence import Evidence, Schedule, gather, wait_summary
from traces.findings import Finding, seconds_text
from traces.overlap import spread
from traces.phases import COMPUTE, PHASES
from traces.runs import Run

FAULTS = (
    network_rules.slow_link,
    rank_rules.straggler,
    rank_rules.stalls,
    rank_rules.data,
    rank_rules.imbalance,
)
# The first that applies: each is a special case of what follows.
SHAPES = (network_rules.latency_bound, network_rules.server_hotspot, network_rules.network_congestion)
COMPUTE_BOUND = 0.5  # of the step


@dataclass(frozen=True)
class Diagnosis:
    """The chosen finding, all findings that applied (the chosen one first), and the evidence."""

    finding: Finding
    others: list[Finding]
    evidence: Evidence

    @property
    def bottleneck(self) -> dict:
        """As scripts/diagnose.py --json prints it."""
        one = self.finding
        share = min(1.0, max(0.0, one.seconds / self.evidence.step_s))
        return {
            "kind": one.kind, "phase": one.phase, "node": one.node, "rank": one.rank, "direction": one.direction,
            "share": share,
        }  # fmt: skip


def diagnose(run: Run, times: StepTimes, schedule: Schedule | None = None) -> Diagnosis:
    """schedule: what the strategy's messages say, from who knows the strategies; None to go without."""
    evidence = gather(run, times, schedule)
    faults = sorted((one for rule in FAULTS for one in rule(evidence)), key=lambda one: -one.seconds)
    shapes = [one for rule in SHAPES for one in rule(evidence)]
    chosen, *others = [*faults, *_ordered(evidence, shapes), compute_or_none(evidence)]
    return Diagnosis(chosen, others, evidence)


def _ordered(evidence: Evidence, shapes: list[Finding]) -> list[Finding]:
    """The exchange's shapes, none where computing takes longer than exchanging."""
    return shapes if evidence.transfer_s >= compute_s(evidence) else []


def compute_s(evidence: Evidence) -> float:
    """Median over steps of the seconds that the busiest rank computes."""
    return float(np.median(evidence.phase(*COMPUTE).max(axis=1)))


def compute_or_none(evidence: Evidence) -> Finding:
    seconds = compute_s(evidence)
    share = seconds / evidence.step_s
    if share < COMPUTE_BOUND:
        return Finding("none", 0.0, "nothing stands out: " + _parts_text(evidence))
    phase = max(COMPUTE, key=lambda name: np.median(evidence.phase(name).max(axis=1)))
    exchange = evidence.transfer_s / evidence.step_s
    text = f"computing takes {share:.0%} of the step ({seconds_text(seconds)}), exchanging {exchange:.0%}: "
    return Finding("compute-bound", seconds, text + "faster kernels, more cores or more ranks would help", phase)


def _parts_text(evidence: Evidence) -> str:
    shares = {name: float(np.median(evidence.phase(name).mean(axis=1))) / evidence.step_s for name in PHASES}
    largest = sorted(shares, key=shares.get, reverse=True)[:3]
    return ", ".join(f"{name} {shares[name]:.0%}" for name in largest if shares[name] > 0) + " of the step"


def evidence_dict(diagnosis: Diagnosis) -> dict:
    """The numbers behind a verdict, ready for JSON; times in seconds, rates in bytes/s."""
    evidence = diagnosis.evidence
    ranks = evidence.rank_numbers
    result = {
        "steps": len(evidence.times.steps),
        "step_s": evidence.step_s,
        "compute_s": compute_s(evidence),
        "exchange_s": evidence.transfer_s,
        "exchange_by_phase_s": evidence.transfer_by_phase,
        "hidden_exchange_s": evidence.overlap.hidden_s,
        "waiting_s": wait_summary(evidence),
        "waited_for_s": _waited_for(evidence),
        "efficiency": evidence.efficiency.as_dict(),
        "ranks": [
            {"rank": rank, "node": node, "compute_s": compute, "data_s": data}
            for rank, node, compute, data in zip(
                ranks, evidence.rank_nodes, _quartiles(evidence.compute), _quartiles(evidence.phase("data")),
                strict=True,
            )
        ],
        "nodes": _nodes(evidence),
        "finding": diagnosis.finding.facts,
        "also": [{"kind": one.kind, "seconds": one.seconds, "sentence": one.sentence} for one in diagnosis.others],
        "thin": evidence.thin,
    }  # fmt: skip
    return result


def _quartiles(seconds: np.ndarray) -> list[dict[str, float]]:
    """Of each rank, from (S, R) seconds."""
    table = spread(seconds)
    return [{name: float(table[name][rank]) for name in table} for rank in range(seconds.shape[1])]


def _waited_for(evidence: Evidence) -> dict[str, float]:
    """Median over steps of the seconds that the other ranks together waited for each rank that anyone waited for."""
    caused = evidence.wait_states.caused(evidence.times.steps, len(evidence.run.ranks)).sum(axis=1)
    medians = np.median(caused, axis=0)
    return {str(rank): float(s) for rank, s in zip(evidence.rank_numbers, medians, strict=True) if s > 0}


def _nodes(evidence: Evidence) -> list[dict]:
    """Of each node: host, the link as probed, bytes a step and the share of the link's rate used, where known."""
    amounts, used = network_rules.node_bytes(evidence), network_rules.port_use(evidence)
    links = {link["node"]: link for link in evidence.links}
    rows = []
    for index, node in enumerate(evidence.nodes):
        row = {"node": node, "host": evidence.host(node)}
        if node in links:
            row["link_bytes_per_s"] = {way: links[node][way] for way in ("in", "out", "both")}
        if amounts is not None:
            row["bytes_a_step"] = {way: float(amounts[way][index]) for way in amounts}
        if used is not None:
            row["link_used"] = {way: used[way][index] for way in used}
        rows.append(row)
    return rows
