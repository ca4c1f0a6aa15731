"""The titles of figures. No figure judges by itself.

A figure passes its plain numbers. If it shows the evidence of the verdict, the verdict's headline is its title and the
numbers are the line below; otherwise the numbers are its title.
"""

from traces.verdict.evidence import Finding
from traces.verdict.summary import TimedRun

# These show a whole step, and so every verdict.
WHOLE_STEP = ("timeline", "phases")
# The other figures that show a verdict, by its kind.
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


def title_lines(one: TimedRun, figure: str, facts: str, more: str = "") -> tuple[str, str]:
    """Return the title of a figure of one run and the line below it, "" for none.

    figure: "timeline", "ranks", ... facts: its numbers, without a judgment. more: numbers too long for a title.
    """
    finding = one.diagnosis.finding
    if figure in shown_in(finding):
        return f"{one.label}: {finding.headline}", "; ".join(filter(None, [facts, more]))
    return f"{one.label}: {facts}", more


def shown_in(finding: Finding) -> tuple[str, ...]:
    """Return the figures that show the finding."""
    # All figures but the heatmaps of ranks show the median step, which has no stalls.
    return ("ranks",) if "stalls" in finding.facts else (*WHOLE_STEP, *SHOWN_IN[finding.kind])
