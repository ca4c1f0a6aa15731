"""The verdict on a run: what holds its steps up, from rules that each look for one thing.

Faults of one rank or port come first, the costliest of them: they can be repaired, and they make everything else look
bad too. Without one the verdict is what the step consists of: a server's port, all ports, latency, data or computing.
"""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes, check_sums
from traces.read.runs import Run
from traces.record.phases import COMPUTE, PHASES
from traces.units import range_text, seconds_text
from traces.verdict import model_rules, network_rules, rank_rules
from traces.verdict.evidence import Evidence, Finding, PredictedExchange, gather

FAULTS = (
    network_rules.slow_link,
    rank_rules.straggler,
    rank_rules.stalls,
    rank_rules.data,
    rank_rules.imbalance,
    model_rules.stage_imbalance,
)
# How the model is cut, where that costs much: the costliest first.
CUTS = (model_rules.tensor_exchange, model_rules.pipeline_bubble)
# The first that applies: each is a special case of what follows.
SHAPES = (network_rules.latency_bound, network_rules.server_hotspot, network_rules.network_congestion)
COMPUTE_BOUND = 0.5  # of the step
NETWORK_KINDS = ("network-congestion", "server-hotspot", "slow-link", "latency-bound")
WORTH_SAYING = 1.1  # times faster


@dataclass(frozen=True)
class Diagnosis:
    """The chosen finding, the other findings in order of importance, and the evidence."""

    finding: Finding
    others: list[Finding]
    evidence: Evidence

    def answer(self, advice: list[dict], model: dict | None = None) -> dict:
        """The object that scripts/diagnose.py --json prints; times in seconds, rates in bytes/s.

        advice: [{"strategy", "predicted_step_s", "speedup", "range_s", "compared"}, ...], the shortest step first: what
        others would take, and whether that is "faster" than the run, "slower" or "no clear winner". model: what these
        rest on; "reason": why there are none; "advised": which is the best, if one is faster.
        """
        chosen, evidence = self.finding, self.evidence
        bottleneck = {name: getattr(chosen, name) for name in ("kind", "phase", "node", "rank", "direction")}
        bottleneck["share"] = min(1.0, max(0.0, chosen.seconds / evidence.step_s))
        numbers = evidence.numbers() | {
            "finding": chosen.facts,
            "also": [{"kind": one.kind, "seconds": one.seconds, "sentence": one.sentence} for one in self.others],
            "sums": check_sums(evidence.run, evidence.times),
            "thin": evidence.thin,
            "model": model,
        }
        return {"verdict": self.verdict(advice, model), "bottleneck": bottleneck, "evidence": numbers, "advice": advice}

    def verdict(self, advice: list[dict], model: dict | None = None) -> str:
        """One sentence: the finding, what another strategy would do about it, and what is uncertain."""
        sentence = self.finding.sentence
        if self.finding.kind in NETWORK_KINDS:
            sentence += self._about_others(advice, model or {})
        if self.evidence.thin:
            sentence += f" (uncertain: {'; '.join(self.evidence.thin)})"
        return sentence

    def _about_others(self, advice: list[dict], model: dict) -> str:
        """ "" where no other strategy may be faster by so much that it is worth saying."""
        if model.get("predicted_exchange_s") is not None and model["reason"] is not None:
            return "; the cost model does not explain it, so no other strategy is advised"
        step_s = self.evidence.step_s
        for row in advice:
            if row["strategy"] == model.get("advised") and row["predicted_step_s"] * WORTH_SAYING <= step_s:
                seconds = seconds_text(row["predicted_step_s"])
                return f"; {row['strategy']} would take {seconds} a step instead of {seconds_text(step_s)}"
        for row in advice:
            if row["compared"] == "no clear winner" and row["range_s"][0] * WORTH_SAYING <= step_s:
                between = range_text(row["range_s"])
                return f"; no clear winner among other strategies: {row['strategy']} would take {between} a step"
        return ""


def find_bottleneck(run: Run, times: StepTimes, predicted: PredictedExchange | None = None) -> Diagnosis:
    """predicted: what the strategy's messages say, from who knows the strategies; None to go without."""
    evidence = gather(run, times, predicted)
    faults = sorted((one for rule in FAULTS for one in rule(evidence)), key=lambda one: -one.seconds)
    cuts = sorted((one for rule in CUTS for one in rule(evidence)), key=lambda one: -one.seconds)
    chosen, *others = [*faults, *cuts, *_shape(evidence, faults)] or [compute_or_none(evidence)]
    return Diagnosis(chosen, others, evidence)


def _shape(evidence: Evidence, faults: list[Finding]) -> list[Finding]:
    """The first shape that applies, in a list, or none.

    None where computing takes longer than exchanging: the exchange's shape holds nothing up. Nor beside a slow port,
    which makes any exchange long: what its shape would be without that port, the run does not tell.
    """
    if evidence.transfer_s < evidence.compute_s or any(one.kind == "slow-link" for one in faults):
        return []
    return [one for rule in SHAPES for one in rule(evidence)][:1]


def compute_or_none(evidence: Evidence) -> Finding:
    seconds = evidence.compute_s
    share = seconds / evidence.step_s
    if share < COMPUTE_BOUND:
        shares = {name: float(np.median(evidence.phase(name).mean(axis=1))) / evidence.step_s for name in PHASES}
        largest = sorted(shares, key=shares.get, reverse=True)[:3]
        parts = ", ".join(f"{name} {shares[name]:.0%}" for name in largest if shares[name] > 0)
        return Finding("none", 0.0, f"nothing stands out: {parts} of the step")
    phase = max(COMPUTE, key=lambda name: np.median(evidence.phase(name).max(axis=1)))
    exchange = evidence.transfer_s / evidence.step_s
    text = f"computing takes {share:.0%} of the step ({seconds_text(seconds)}), exchanging {exchange:.0%}: "
    return Finding("compute-bound", seconds, text + "faster kernels, more cores or more ranks would help", phase)
