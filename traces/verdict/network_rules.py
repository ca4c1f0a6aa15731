"""Is it the network? One node's slow port, a server's port, all ports, or messages too small for any port.

Each rule takes the evidence and returns its findings.
"""

import numpy as np

from traces.record.phases import INDEX
from traces.units import bytes_text, seconds_text
from traces.verdict.evidence import Evidence, Finding

SLOW_PORT = 0.6  # of the others' median rate: below it a port is slow
LEAST_SHARE = 0.05  # of a step: what is worth naming a port for
LEAST_TRANSFER_SHARE = 0.3  # of a step: below it the exchange is not what holds the step up
HOTSPOT = 1.25  # times the other nodes' bytes, one way
PORT_IDLE = 0.25  # of the transfer's time that its bytes need: below it they do not fill the port
LATENCIES = 50  # a message whose bytes take longer than so many latencies is not small


def slow_link(evidence: Evidence) -> list[Finding]:
    """One node's port is slower than the others', and the exchange runs at its rate.

    All sources must agree: before the run, after it, and over all of it the port has carried little (Evidence.links).
    """
    links = list(evidence.links.values())
    if len(links) < 2:
        return []
    ratios = link_ratios(links)
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


def _slow_link(evidence: Evidence, index: int, slow: list[str], lost_s: float) -> Finding:
    links = list(evidence.links.values())
    link = links[index]
    ways, node = " and ".join(slow), link["node"]
    others = [one for one in links if one is not link]
    usual_rates = {way: float(np.median([one[way] for one in others])) for way in ("in", "out")}
    rate, usual = (min(one[way] for way in slow) for one in (link, usual_rates))
    facts = {"rate_bytes_per_s": {way: link[way] for way in ("in", "out")}, "others_rate_bytes_per_s": usual_rates}
    when = "before the run as after it" if evidence.run.end_links else "as probed before the run"
    sentence = (
        f"{link['host']}'s port carries {bytes_text(rate)}/s {ways}, {when}, the other nodes' {bytes_text(usual)}/s, "
        f"and every exchange waits for it: check its cable, switch port and negotiated speed"
    )
    if len(links) == 2:
        sender = link if slow == ["out"] else others[0]
        sentence = f"the link out of {sender['host']} carries {bytes_text(rate)}/s, the other way {bytes_text(usual)}/s"
        node = None
    direction = slow[0] if len(slow) == 1 and node is not None else None
    return Finding("slow-link", lost_s, sentence, evidence.transfer_phase, node, None, direction, facts)


def _is_long(evidence: Evidence) -> bool:
    """The exchange may be what holds the step up."""
    return evidence.transfer_s >= LEAST_TRANSFER_SHARE * evidence.step_s


def server_hotspot(evidence: Evidence) -> list[Finding]:
    """The exchange goes through the port of the node where the root is; it carries more than the others."""
    root = _only_root(evidence)
    if root is None or len(evidence.run.nodes) < 3 or not _is_long(evidence):
        return []
    node = evidence.run.rank_nodes[root]
    index = evidence.run.nodes.index(node)
    amounts = evidence.node_bytes
    if amounts is not None:
        ratios = [one[index] / max(np.median(np.delete(one, index)), 1.0) for one in amounts.values()]
        if max(ratios) < HOTSPOT:
            return []
    direction = _busier_way(evidence, node, amounts)
    phase = "reduce" if direction == "in" else "bcast"
    by_phase = evidence.transfer_by_phase
    seconds = by_phase.get("reduce", 0.0) + by_phase.get("bcast", 0.0)
    text = _hotspot_text(evidence, node, amounts, direction, phase)
    facts = {"server_rank": evidence.run.rank_numbers[root], f"{phase}_s": by_phase.get(phase, 0.0)}
    return [Finding("server-hotspot", seconds, text, phase, node, None, direction, facts)]


def _busier_way(evidence: Evidence, node: int, amounts: dict[str, np.ndarray] | None) -> str:
    """The direction in which a server's port is busy longest: by its bytes and rate, or by the phases' times."""
    link = evidence.links.get(node)
    if amounts is None or link is None:
        by_phase = evidence.transfer_by_phase
        return "in" if by_phase.get("reduce", 0.0) >= by_phase.get("bcast", 0.0) else "out"
    return max(amounts, key=lambda way: amounts[way][evidence.run.nodes.index(node)] / link[way])


def _only_root(evidence: Evidence) -> int | None:
    """The index of the rank that is root of every exchange with bytes in it; None where there is no such one."""
    roots = set()
    for trace in evidence.run.ranks:
        is_rooted = np.isin(trace.records["phase"], [INDEX["reduce"], INDEX["bcast"]])
        roots |= set(np.unique(trace.records["root"][is_rooted]).tolist())
    if len(roots) != 1 or roots == {-1}:
        return None
    root = roots.pop()
    return evidence.run.rank_numbers.index(root) if root in evidence.run.rank_numbers else None


def _hotspot_text(evidence: Evidence, node: int, amounts, direction: str, phase: str) -> str:
    host, verb = evidence.run.hosts[node], "receives" if direction == "in" else "sends"
    share = evidence.transfer_by_phase[phase] / evidence.step_s
    text = f"{phase} takes {share:.0%} of the step"
    if amounts is None:
        return f"everything goes through the port of {host}, where the server is: {text}"
    link = evidence.links.get(node)
    through = f" through a port that carries {bytes_text(link[direction])}/s" if link else ""
    return f"{host} {verb} {bytes_text(amounts[direction][evidence.run.nodes.index(node)])} a step{through}: {text}"


def network_congestion(evidence: Evidence) -> list[Finding]:
    """The exchange is the largest part of the step, and no one's port in particular."""
    if len(evidence.run.ranks) < 2 or not _is_long(evidence):
        return []
    share, phase = evidence.transfer_s / evidence.step_s, evidence.transfer_phase
    amounts = evidence.node_bytes
    if len(evidence.run.nodes) == 1:
        text = f"the ranks share one node, and exchanging takes {share:.0%} of the step, longest in {phase}"
    elif amounts is None:
        text = f"exchanging takes {share:.0%} of the step, longest in {phase}"
    else:
        busiest, direction = max(((amounts[way].max(), way) for way in amounts), key=lambda one: one[0])
        rates = [link["both"] for link in evidence.links.values()]
        port = f"a node's port, which carries {bytes_text(np.median(rates))}/s" if rates else "a node's port"
        text = f"up to {bytes_text(busiest)} a step go {direction} through {port}: "
        text += f"exchanging takes {share:.0%} of the step, longest in {phase}"
    return [Finding("network-congestion", evidence.transfer_s, text, phase, facts={"exchange_s": evidence.transfer_s})]


def latency_bound(evidence: Evidence) -> list[Finding]:
    """The exchange takes long, and its bytes would need a small part of that: it is many small messages."""
    amounts = evidence.node_bytes
    if amounts is None or len(evidence.run.nodes) < 2 or not evidence.links or not _is_long(evidence):
        return []
    bandwidth_s = max(float(np.nanmax(amounts[way] / evidence.link_rates(way))) for way in ("in", "out"))
    calls, size = exchange_calls(evidence)
    latency_s = max(link["latency_s"] for link in evidence.links.values())
    rate = float(np.nanmedian(evidence.link_rates("in")))
    is_small = size / rate <= LATENCIES * latency_s
    if bandwidth_s > PORT_IDLE * evidence.transfer_s or not is_small:
        return []
    share = evidence.transfer_s / evidence.step_s
    text = (
        f"{calls:.0f} exchanges a step of {bytes_text(size)} each take {share:.0%} of it, their bytes would need "
        f"{seconds_text(bandwidth_s)} of {seconds_text(evidence.transfer_s)}: exchange more at once"
    )
    facts = {"calls": calls, "bytes_per_call": size, "bandwidth_s": bandwidth_s, "latency_s": latency_s}
    return [Finding("latency-bound", evidence.transfer_s, text, evidence.transfer_phase, facts=facts)]


def exchange_calls(evidence: Evidence) -> tuple[float, float]:
    """(exchanges a step on the rank that makes most, mean bytes of one): those of single numbers left out."""
    counts, sizes = [], []
    for trace in evidence.run.ranks:
        chosen = np.isin(trace.records["step"], evidence.times.steps) & (trace.records["bytes"] > 8)
        counts.append(chosen.sum() / len(evidence.times.steps))
        sizes.append(trace.records["bytes"][chosen].mean() if chosen.any() else 0.0)
    most = int(np.argmax(counts))
    return float(counts[most]), float(sizes[most])
