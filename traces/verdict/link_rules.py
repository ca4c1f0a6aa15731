"""Is it one node's port? The probed rates of the links, checked with what the ports carried during the run."""

import numpy as np

from traces.verdict.evidence import Evidence
from traces.verdict.findings import Finding, bytes_text

SLOW_PORT = 0.6  # of the others' median rate: below it a port is slow
CONTRADICTED = 1.4  # a port that carried so much more than the probe saw was disturbed while probed
LEAST_SHARE = 0.05  # of a step: what is worth naming a port for


def slow_link(evidence: Evidence) -> list[Finding]:
    """One node's port is slower than the others' and the exchange runs at its rate."""
    if len(evidence.links) < 2:
        return []
    ratios = link_ratios(evidence.links)
    rates = {way: np.array([link[way] for link in evidence.links]) for way in ratios}
    for way in ratios:
        ratios[way] = np.where(_is_contradicted(evidence, rates[way], way), 1.0, ratios[way])
    # A slow port makes its neighbours' probes look slow at times, one way; its own both ways together most.
    index = int(np.argmin(sum(np.log(np.minimum(ratio, 1.0)) for ratio in ratios.values())))
    slow = [way for way in ratios if ratios[way][index] < SLOW_PORT]
    lost_s = evidence.transfer_s * (1 - min((ratios[way][index] for way in slow), default=1.0))
    if not slow or lost_s < LEAST_SHARE * evidence.step_s:
        return []
    return [_slow_link(evidence, index, slow, lost_s)]


def link_ratios(links: list[dict]) -> dict[str, np.ndarray]:
    """{"in", "out"}: (M,) each node's rate over what is usual among the others: the lower of their medians in and out.

    A transfer that ends in a sender's buffers looks faster than any port; it must not make the others look slow. Of two
    nodes, the one's out is the other's in, and the faster of these two ways is what is usual.
    """
    rates = {way: np.array([link[way] for link in links]) for way in ("in", "out")}
    if len(links) == 2:
        usual = np.minimum(rates["out"], rates["in"][::-1]).max()
    else:
        usual = np.array([min(np.median(np.delete(rates[way], node)) for way in rates) for node in range(len(links))])
    return {way: rates[way] / usual for way in rates}


def _is_contradicted(evidence: Evidence, rates: np.ndarray, way: str) -> np.ndarray:
    """(M,) bool, in the order of the links: the port carried far more during the run than the probe saw."""
    if evidence.traffic is None:
        return np.zeros(len(rates), bool)
    carried = dict(zip(evidence.traffic.nodes, evidence.traffic.exchange_rate(way), strict=True))
    nodes = [link["node"] for link in evidence.links]
    return np.array([carried.get(node, 0.0) for node in nodes]) > CONTRADICTED * rates


def _slow_link(evidence: Evidence, index: int, slow: list[str], lost_s: float) -> Finding:
    link = evidence.links[index]
    ways, node = " and ".join(slow), link["node"]
    others = [one for one in evidence.links if one is not link]
    rate, usual = (min(one[way] for way in slow) for one in (link, _medians(others)))
    facts = {"rate_bytes_per_s": {way: link[way] for way in ("in", "out")}, "others_rate_bytes_per_s": _medians(others)}
    sentence = (
        f"{link['host']}'s port carries {bytes_text(rate)}/s {ways}, the other nodes' {bytes_text(usual)}/s, and every "
        f"exchange waits for it: check its cable, switch port and negotiated speed"
    )
    if len(evidence.links) == 2:
        sender = link if slow == ["out"] else others[0]
        sentence = f"the link out of {sender['host']} carries {bytes_text(rate)}/s, the other way {bytes_text(usual)}/s"
        node = None
    direction = slow[0] if len(slow) == 1 and node is not None else None
    return Finding("slow-link", lost_s, sentence, evidence.transfer_phase, node, None, direction, facts)


def _medians(links: list[dict]) -> dict[str, float]:
    return {way: float(np.median([link[way] for link in links])) for way in ("in", "out")}
