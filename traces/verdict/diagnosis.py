"""The verdict on a run: what slows its steps, by rules that each look for one thing.

Findings come in this order, and the first one is the verdict:
1. faults, the costliest first: they can be repaired, and they make everything else look bad too,
2. costs of sharing a model, the costliest first,
3. the shape of the exchange, if the exchange takes longer than compute and no port is slow,
4. without any of these: compute, or no bottleneck at all.
"""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes, check_sums
from traces.read.runs import Run
from traces.record.phases import COMPUTE, PHASES
from traces.units import range_text, seconds_text
from traces.verdict import model_rules, network_rules, rank_rules
from traces.verdict.evidence import Evidence, Finding, PredictedExchange, gather
from traces.verdict.thresholds import COMPUTE_BOUND, LEAST_TRANSFER_SHARE, WORTH_SAYING

FAULTS = (
    network_rules.slow_link,
    rank_rules.straggler,
    rank_rules.stalls,
    rank_rules.data,
    rank_rules.imbalance,
    model_rules.stage_imbalance,
)
# The cost of sharing a model among ranks, the costliest first.
CUTS = (model_rules.tensor_exchange, model_rules.pipeline_bubble)
# The first one that applies counts: each is a special case of the next.
SHAPES = (network_rules.latency_bound, network_rules.server_hotspot, network_rules.network_congestion)
SHAPE_KINDS = ("network-congestion", "server-hotspot", "latency-bound")
NETWORK_KINDS = (*SHAPE_KINDS, "slow-link")


@dataclass(frozen=True)
class Diagnosis:
    """The chosen finding, the other findings by importance, and the evidence."""

    finding: Finding
    others: list[Finding]
    evidence: Evidence

    def answer(self, advice: list[dict], model: dict | None = None) -> dict:
        """Return the object that scripts/diagnose.py --json prints; times in seconds, rates in bytes/s.

        advice: [{"strategy", "predicted_step_s", "speedup", "range_s", "compared", "same_weights"}, ...], the shortest
        step first. compared: "faster", "slower" or "no clear winner". model: grounds of these predictions; "reason":
        why there are none; "advised": the best exact strategy, if faster; "with_other_weights": [a text on another].
        """
        chosen = self.finding
        evidence = self.evidence
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
        """Say in one sentence: the finding, the best other strategy's prediction, and the uncertainties."""
        sentence = self.finding.sentence
        if self.finding.kind in NETWORK_KINDS:
            sentence += self._about_others(advice, model or {})
        if self.finding.kind in SHAPE_KINDS:
            sentence = "; ".join([sentence, *(model or {}).get("with_other_weights", [])])
        if self.evidence.thin:
            sentence += f" (uncertain: {'; '.join(self.evidence.thin)})"
        return sentence

    def _about_others(self, advice: list[dict], model: dict) -> str:
        """Say how long a step of the best other strategy would take; "" unless one may be faster by WORTH_SAYING."""
        if model.get("predicted_exchange_s") is not None and model["reason"] is not None:
            return "; the cost model does not explain it, so no other strategy is advised"
        step_s = self.evidence.step_s
        for row in advice:
            if row["strategy"] == model.get("advised") and row["predicted_step_s"] * WORTH_SAYING <= step_s:
                seconds = seconds_text(row["predicted_step_s"])
                return f"; {row['strategy']} would take {seconds} a step instead of {seconds_text(step_s)}"
        for row in (row for row in advice if row["same_weights"]):
            if row["compared"] == "no clear winner" and row["range_s"][0] * WORTH_SAYING <= step_s:
                between = range_text(row["range_s"])
                return f"; no clear winner among other strategies: {row['strategy']} would take {between} a step"
        return ""


def find_bottleneck(run: Run, times: StepTimes, predicted: PredictedExchange | None = None) -> Diagnosis:
    """Diagnose a run. predicted: from the messages of its strategy, which this package does not know; may be None."""
    evidence = gather(run, times, predicted)
    faults = sorted((one for rule in FAULTS for one in rule(evidence)), key=lambda one: -one.seconds)
    cuts = sorted((one for rule in CUTS for one in rule(evidence)), key=lambda one: -one.seconds)
    chosen, *others = [*faults, *cuts, *_shape(evidence, faults)] or [compute_or_none(evidence)]
    return Diagnosis(chosen, others, evidence)


def _shape(evidence: Evidence, faults: list[Finding]) -> list[Finding]:
    """Return the first shape that applies, in a list; [] if none does.

    No shape applies if compute takes longer than the exchange, or if a port is slow: a slow port makes any exchange
    long, so the run does not show the exchange's own cost.
    """
    if evidence.transfer_s < evidence.compute_s or any(one.kind == "slow-link" for one in faults):
        return []
    return [one for rule in SHAPES for one in rule(evidence)][:1]


def compute_or_none(evidence: Evidence) -> Finding:
    """Return the finding of a run in which no rule found anything."""
    seconds = evidence.compute_s
    if seconds < COMPUTE_BOUND * evidence.step_s:
        shares = {name: float(np.median(evidence.times.phase(name).mean(axis=1))) / evidence.step_s for name in PHASES}
        largest = sorted(shares, key=shares.get, reverse=True)[:3]
        parts = ", ".join(f"{name} {shares[name]:.0%}" for name in largest if shares[name] > 0)
        return Finding("none", 0.0, "nothing stands out", f"nothing stands out: {parts} of the step")
    phase = max(COMPUTE, key=lambda name: np.median(evidence.times.phase(name).max(axis=1)))
    headline = f"computing takes {evidence.share(seconds)}"
    exchanging = evidence.transfer_s / evidence.step_s
    advice = "faster kernels, more cores or more ranks would help"
    if exchanging >= LEAST_TRANSFER_SHARE:
        advice = "faster kernels or more cores would help most, then a shorter exchange"
    text = f"{headline} ({seconds_text(seconds)}), exchanging {exchanging:.0%}: {advice}"
    return Finding("compute-bound", seconds, headline, text, phase)
