"""Rules about the network: one node's slow port, a server's port, all ports, messages too small for any port.

Each rule takes the evidence and returns its findings.
"""

import numpy as np

from traces.record.phases import EXCHANGE, INDEX
from traces.units import bytes_text, seconds_text
from traces.verdict.evidence import Evidence, Finding
from traces.verdict.thresholds import BYTES_SHARE, HOTSPOT, LEAST_SHARE, LEAST_TRANSFER_SHARE, MAX_LATENCIES, SLOW_PORT

ONE_NUMBER_BYTES = 8
PHASE_OF = {"in": "reduce", "out": "bcast"}  # the phase that uses a direction of a server's port


def slow_link(evidence: Evidence) -> list[Finding]:
    """Find a port that is slower than the ports of other nodes, so that the exchange runs at its rate.

    The probes before and after the run and the run's own traffic must agree (Evidence.links).
    """
    links = list(evidence.links.values())
    if len(links) < 2:
        return []
    ratios = link_ratios(links)
    # A slow port may make its neighbours' probes look slow in one direction; over both directions it is the slowest.
    index = int(np.argmin(sum(np.log(np.minimum(ratio, 1.0)) for ratio in ratios.values())))
    slow = [way for way in ratios if ratios[way][index] < SLOW_PORT]
    lost_s = evidence.transfer_s * (1 - min((ratios[way][index] for way in slow), default=1.0))
    if not slow or lost_s < LEAST_SHARE * evidence.step_s:
        return []
    return [_slow_link(evidence, links[index], slow, lost_s)]


def link_ratios(links: list[dict]) -> dict[str, np.ndarray]:
    """Return {"in", "out"}: (M,) each node's rate over the usual rate of others: the lower of their medians in and out.

    A probe that ends in a sender's buffers looks faster than any port, and must not make the others look slow. With two
    nodes, the out rate of one is the in rate of the other, and the faster direction is the usual rate.
    """
    rates = {way: np.array([link[way] for link in links]) for way in ("in", "out")}
    if len(links) == 2:
        usual = np.minimum(rates["out"], rates["in"][::-1]).max()
    else:
        usual = np.array([min(np.median(np.delete(rates[way], node)) for way in rates) for node in range(len(links))])
    return {way: rates[way] / usual for way in rates}


def _slow_link(evidence: Evidence, link: dict, slow: list[str], lost_s: float) -> Finding:
    ways = " and ".join(slow)
    phase = evidence.transfer_phase
    others = [one for one in evidence.links.values() if one is not link]
    usual_rates = {way: float(np.median([one[way] for one in others])) for way in ("in", "out")}
    rate, usual = (min(one[way] for way in slow) for one in (link, usual_rates))
    facts = {"rate_bytes_per_s": {way: link[way] for way in ("in", "out")}, "others_rate_bytes_per_s": usual_rates}
    when = "before and after the run" if evidence.run.end_links else "as probed before the run"
    text = f"{link['host']}'s port carries {bytes_text(rate)}/s {ways}, {when}, the other nodes' ports "
    text += f"{bytes_text(usual)}/s, and every exchange waits for it: check its cable, switch port and negotiated speed"
    if len(others) == 1:
        sender = link if slow == ["out"] else others[0]
        text = f"the link out of {sender['host']} carries {bytes_text(rate)}/s, the other direction "
        text += f"{bytes_text(usual)}/s: check cables, switch ports and negotiated speeds"
        headline = "one way of the link is slower than the other"
        return Finding("slow-link", lost_s, headline, text, phase, facts=facts)
    direction = slow[0] if len(slow) == 1 else None
    way = f" {direction}" if direction else ""
    headline = f"the port of {link['host']} is slow{way}, and every exchange waits for it"
    return Finding("slow-link", lost_s, headline, text, phase, link["node"], None, direction, facts)


def _is_long(evidence: Evidence) -> bool:
    """Return whether the exchange may slow the step."""
    return evidence.transfer_s >= LEAST_TRANSFER_SHARE * evidence.step_s


def server_hotspot(evidence: Evidence) -> list[Finding]:
    """Find the port of the root's node, if the exchange goes through it and it carries more than the others."""
    root = _only_root(evidence)
    if root is None or len(evidence.run.nodes) < 3 or not _is_long(evidence):
        return []
    node = evidence.run.rank_nodes[root]
    index = evidence.run.nodes.index(node)
    amounts = evidence.node_bytes
    link = evidence.links.get(node)
    by_phase = evidence.transfer_by_phase
    # Seconds that each direction of the port is busy: from bytes and rate, or from the phase that uses it.
    busy_s = {way: by_phase[phase] for way, phase in PHASE_OF.items() if phase in by_phase}
    if amounts is not None:
        usual = {way: max(np.median(np.delete(amounts[way], index)), 1.0) for way in busy_s}
        hot = [way for way in busy_s if amounts[way][index] >= HOTSPOT * usual[way]]
        busy_s = {way: amounts[way][index] / link[way] if link else busy_s[way] for way in hot}
    if not busy_s:
        return []
    direction = max(busy_s, key=busy_s.get)
    phase = PHASE_OF[direction]
    seconds = by_phase.get("reduce", 0.0) + by_phase.get("bcast", 0.0)
    verb = "receives" if direction == "in" else "sends"
    host = evidence.run.hosts[node]
    headline = f"{host}, where the server is, {verb} for all"
    share = f"{phase} takes {by_phase[phase] / evidence.step_s:.0%} of the step"
    text = f"everything goes through the port of {host}, where the server is: {share}"
    if amounts is not None:
        amount = bytes_text(amounts[direction][index])
        headline = f"{headline}: {amount} a step"
        through = f" through a port that carries {bytes_text(link[direction])}/s" if link else ""
        text = f"{host} {verb} {amount} a step{through}: {share}"
    facts = {"server_rank": evidence.run.rank_numbers[root], f"{phase}_s": by_phase[phase]}
    return [Finding("server-hotspot", seconds, headline, text, phase, node, None, direction, facts)]


def _only_root(evidence: Evidence) -> int | None:
    """Return the index of the rank that is the root of every reduce and bcast; None without such a rank."""
    roots = set()
    for trace in evidence.run.ranks:
        is_rooted = np.isin(trace.records["phase"], [INDEX["reduce"], INDEX["bcast"]])
        roots |= set(np.unique(trace.records["root"][is_rooted]).tolist())
    if len(roots) != 1 or roots == {-1}:
        return None
    root = roots.pop()
    return evidence.run.rank_numbers.index(root) if root in evidence.run.rank_numbers else None


def network_congestion(evidence: Evidence) -> list[Finding]:
    """Find an exchange that takes a large part of the step. It applies only if no more special shape does."""
    if len(evidence.run.ranks) < 2 or not _is_long(evidence):
        return []
    phase = evidence.transfer_phase
    amounts = evidence.node_bytes
    headline = f"exchanging takes {evidence.share(evidence.transfer_s)}"
    text = f"{headline}, longest in {phase}"
    if len(evidence.run.nodes) == 1:
        text = f"the ranks share one node, and {text}"
    elif amounts is not None:
        busiest, direction = max(((amounts[way].max(), way) for way in amounts), key=lambda one: one[0])
        verb = "enter" if direction == "in" else "leave"
        rates = [link["both"] for link in evidence.links.values()]
        port = f" through a port that carries {bytes_text(np.median(rates))}/s" if rates else ""
        text = f"up to {bytes_text(busiest)} a step {verb} a node{port}: {text}"
    facts = {"exchange_s": evidence.transfer_s}
    return [Finding("network-congestion", evidence.transfer_s, headline, text, phase, facts=facts)]


def latency_bound(evidence: Evidence) -> list[Finding]:
    """Find an exchange that takes long although its bytes need little time and its calls are small."""
    amounts = evidence.node_bytes
    if amounts is None or len(evidence.run.nodes) < 2 or not evidence.links or not _is_long(evidence):
        return []
    bandwidth_s = max(float(np.nanmax(amounts[way] / evidence.link_rates(way))) for way in ("in", "out"))
    calls, size = exchange_calls(evidence)
    latency_s = max(link["latency_s"] for link in evidence.links.values())
    rate = float(np.nanmedian(evidence.link_rates("in")))
    is_small = size / rate <= MAX_LATENCIES * latency_s
    if bandwidth_s > BYTES_SHARE * evidence.transfer_s or not is_small:
        return []
    share = evidence.share(evidence.transfer_s)
    headline = f"{calls:.0f} small exchanges take {share}"
    text = f"{calls:.0f} exchanges of {bytes_text(size)} each take {seconds_text(evidence.transfer_s)}, {share}, "
    text += f"but their bytes need only {seconds_text(bandwidth_s)}: exchange more at once"
    facts = {"calls": calls, "bytes_per_call": size, "bandwidth_s": bandwidth_s, "latency_s": latency_s}
    return [Finding("latency-bound", evidence.transfer_s, headline, text, evidence.transfer_phase, facts=facts)]


def exchange_calls(evidence: Evidence) -> tuple[float, float]:
    """Return (exchanges a step, their mean bytes) on the rank with the most, without exchanges of single numbers."""
    found = []
    for trace in evidence.run.ranks:
        records = trace.records[np.isin(trace.records["phase"], [INDEX[name] for name in EXCHANGE])]
        chosen = np.isin(records["step"], evidence.times.steps) & (records["bytes"] > ONE_NUMBER_BYTES)
        sizes = records["bytes"][chosen]
        found.append((len(sizes) / len(evidence.times.steps), float(sizes.mean()) if len(sizes) else 0.0))
    return max(found, key=lambda one: one[0])
