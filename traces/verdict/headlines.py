"""The words above figures: the verdict in short, and above which figures it stands. No figure judges by itself.

A figure hands in its plain numbers. Where it shows what the verdict rests on, the verdict's headline is its title and
the numbers stand below; elsewhere the numbers are all that it says.
"""

from collections.abc import Callable

from traces.units import bytes_text, seconds_text
from traces.verdict.diagnosis import Diagnosis
from traces.verdict.evidence import Evidence, Finding

# These two show a whole step, so that every verdict is seen there.
WHOLE_STEP = ("timeline", "phases")
SHOWN_IN = {
    "network-congestion": ("ports",),
    "server-hotspot": ("ports", "messages"),
    "slow-link": ("ports", "waits"),
    "straggler": ("ranks", "waits"),
    "imbalance": ("ranks", "waits"),
    "data": ("waits",),
    "compute-bound": ("ranks",),
    "latency-bound": ("ports",),
    "stage-imbalance": ("ranks", "waits"),
    "pipeline-bubble": ("waits",),
    "tensor-exchange": (),
    "none": (),
}


def title_lines(diagnosis: Diagnosis, label: str, figure: str, facts: str, more: str = "") -> tuple[str, str]:
    """The title and the line below it ("" for none) of a figure of one run.

    figure: "timeline", "ranks", ...; facts: what it shows, in numbers, without a judgment; more: such numbers that a
    title has no room for.
    """
    if figure in shown_in(diagnosis.finding):
        return f"{label}: {headline(diagnosis)}", "; ".join(filter(None, [facts, more]))
    return f"{label}: {facts}", more


def shown_in(finding: Finding) -> tuple[str, ...]:
    """The figures in which the finding is seen."""
    # Stalls are not in the median step, which all but the map are of.
    return ("ranks",) if "stalls" in finding.facts else (*WHOLE_STEP, *SHOWN_IN[finding.kind])


def headline(diagnosis: Diagnosis) -> str:
    """The verdict in few words, for a title: "rank 3 on node3 computes 398 ms a step, the others 192 ms"."""
    return HEADLINES[diagnosis.finding.kind](diagnosis.finding, diagnosis.evidence)


def _share(finding: Finding, evidence: Evidence) -> str:
    return f"{min(1.0, finding.seconds / evidence.step_s):.0%} of the step"


def _network_congestion(finding: Finding, evidence: Evidence) -> str:
    return f"exchanging takes {_share(finding, evidence)}"


def _server_hotspot(finding: Finding, evidence: Evidence) -> str:
    verb = "receives" if finding.direction == "in" else "sends"
    text = f"{evidence.run.hosts[finding.node]}, where the server is, {verb} for all"
    if evidence.node_bytes is None:
        return text
    amount = evidence.node_bytes[finding.direction][evidence.run.nodes.index(finding.node)]
    return f"{text}: {bytes_text(amount)} a step"


def _slow_link(finding: Finding, evidence: Evidence) -> str:
    if finding.node is None:
        return "one way of the link is slower than the other"
    way = f" {finding.direction}" if finding.direction else ""
    return f"the port of {evidence.run.hosts[finding.node]} is slow{way}, and every exchange waits for it"


def _straggler(finding: Finding, evidence: Evidence) -> str:
    host, facts = evidence.run.hosts[finding.node], finding.facts
    if "stalls" in facts:
        return f"rank {finding.rank} on {host} stalls now and then for {seconds_text(facts['stall_s'])}"
    who = f"the ranks of {host} compute" if finding.rank is None else f"rank {finding.rank} on {host} computes"
    own, others = (seconds_text(facts[name]) for name in ("compute_s", "others_compute_s"))
    return f"{who} {own} a step, the others {others}"


def _imbalance(finding: Finding, evidence: Evidence) -> str:
    shortest, longest = (seconds_text(finding.facts[f"{name}_compute_s"]) for name in ("shortest", "longest"))
    return f"work is uneven: ranks compute {shortest} to {longest} a step"


def _data(finding: Finding, evidence: Evidence) -> str:
    if finding.rank is None:
        return f"reading data takes {_share(finding, evidence)}"
    who = f"rank {finding.rank} on {evidence.run.hosts[finding.node]}"
    if "stalls" in finding.facts:
        return f"{who} waits now and then for its data, {seconds_text(finding.facts['stall_s'])}"
    return f"{who} waits {seconds_text(finding.facts['data_s'])} a step for its data"


def _compute_bound(finding: Finding, evidence: Evidence) -> str:
    return f"computing takes {_share(finding, evidence)}"


def _latency_bound(finding: Finding, evidence: Evidence) -> str:
    return f"{finding.facts['calls']:.0f} small exchanges take {_share(finding, evidence)}"


def _stage_imbalance(finding: Finding, evidence: Evidence) -> str:
    own, mean = (seconds_text(finding.facts[name]) for name in ("tau_s", "mean_tau_s"))
    return f"stage {finding.facts['stage']} is long: {own} a micro-step, on average stages take {mean}"


def _pipeline_bubble(finding: Finding, evidence: Evidence) -> str:
    facts = finding.facts
    return f"stages wait {_share(finding, evidence)}: {facts['stages']} stages, {facts['micro_steps']} micro-steps"


def _tensor_exchange(finding: Finding, evidence: Evidence) -> str:
    return f"sums over parts take {_share(finding, evidence)}"


def _none(finding: Finding, evidence: Evidence) -> str:
    return "nothing stands out"


HEADLINES: dict[str, Callable[[Finding, Evidence], str]] = {
    "network-congestion": _network_congestion,
    "server-hotspot": _server_hotspot,
    "slow-link": _slow_link,
    "straggler": _straggler,
    "imbalance": _imbalance,
    "data": _data,
    "compute-bound": _compute_bound,
    "latency-bound": _latency_bound,
    "stage-imbalance": _stage_imbalance,
    "pipeline-bubble": _pipeline_bubble,
    "tensor-exchange": _tensor_exchange,
    "none": _none,
}
