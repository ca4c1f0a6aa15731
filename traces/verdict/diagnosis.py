"""The verdict on a run: what holds its steps up, from rules that each look for one thing.

Faults of one rank or port come first, the costliest of them: they can be repaired, and they make everything else look
bad too. Without one the verdict is what the step consists of: a server's port, all ports, latency, data or computing.
"""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes
from traces.read.runs import Run
from traces.record.phases import COMPUTE, PHASES
from traces.verdict import link_rules, network_rules, rank_rules, stall_rules
from traces.verdict.evidence import Evidence, Schedule, gather
from traces.verdict.findings import Finding, seconds_text

FAULTS = (
    link_rules.slow_link,
    rank_rules.straggler,
    stall_rules.stalls,
    stall_rules.data,
    rank_rules.imbalance,
)
# The first that applies: each is a special case of what follows.
SHAPES = (network_rules.latency_bound, network_rules.server_hotspot, network_rules.network_congestion)
COMPUTE_BOUND = 0.5  # of the step


@dataclass(frozen=True)
class Diagnosis:
    """The chosen finding, the others that applied in the order of their weight, and the evidence."""

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


def find_bottleneck(run: Run, times: StepTimes, schedule: Schedule | None = None) -> Diagnosis:
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
