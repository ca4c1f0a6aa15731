"""Findings about clocks and about the network between the nodes, as the ranks have measured them."""

from statistics import median

from scripts.checkup.findings import NOTE, SLOW, Finding, first_of_nodes, known, on_hosts
from traces.units import bytes_text, seconds_text

CLOCK_ERROR_S, TIME_OF_DAY_S = 1e-3, 1.0
SLOWER_PORT, SLOWER_THAN_SAID, LATER = 0.7, 0.5, 4.0
DIRECTIONS = {"out": "sends", "in": "receives"}
MOSTLY = 0.5


def clocks(ranks, model):
    firsts = first_of_nodes(ranks)
    vague = [(facts, error) for facts, error in known(firsts, "clock", "error_s") if error > CLOCK_ERROR_S]
    if vague:
        worst = max(error for _, error in vague)
        text = f"the clock of {on_hosts([facts for facts, _ in vague])} is known to {seconds_text(worst)} only"
        fix = "read waiting times between nodes in the traces with that error; a quieter network makes it smaller"
        yield Finding(NOTE, "clocks", text, fix)
    ahead = [facts for facts, seconds in known(firsts, "clock", "ahead_s") if abs(seconds) > TIME_OF_DAY_S]
    if ahead:
        most = max((facts["clock"]["ahead_s"] for facts in ahead), key=abs)
        text = f"the time of day on {on_hosts(ahead)} is {most:+.1f} s off that of rank 0's host"
        fix = "start chronyd there; logs and files carry wrong times, and authentication (munge) ends at some minutes"
        yield Finding(NOTE, "clocks", text, fix)


def slow_ports(ranks, model):
    """A node whose port is slower than the others', by direction."""
    links = known(first_of_nodes(ranks), "link")
    if len(links) < 3:
        return
    for way, verb in DIRECTIONS.items():
        usual = median(link[way] for _, link in links)
        slow = [(facts, link[way]) for facts, link in links if link[way] < SLOWER_PORT * usual]
        if slow:
            worst = min(rate for _, rate in slow)
            text = (
                f"{on_hosts([facts for facts, _ in slow])} {verb} at {worst / usual:.0%} of the others' rate "
                f"({bytes_text(worst)}/s of {bytes_text(usual)}/s): every exchange waits for it"
            )
            fix = "look at its cable, port and switch (ethtool, ibstat), and at who else uses it; or leave the host out"
            yield Finding(SLOW, "network", text, fix)


def slow_latency(ranks, model):
    links = known(first_of_nodes(ranks), "link", "latency_s")
    if len(links) < 3:
        return
    usual = median(latency for _, latency in links)
    late = [(facts, latency) for facts, latency in links if latency > LATER * usual]
    if not late:
        return
    worst = max(latency for _, latency in late)
    text = (
        f"{seconds_text(worst)} of latency at {on_hosts([facts for facts, _ in late])}, {seconds_text(usual)} elsewhere"
    )
    yield Finding(SLOW, "network", text, "look whether it is behind another switch, or busy; or leave the host out")


def slower_than_said(ranks, model):
    """Both directions measured far below what the interface in use says of itself."""
    some = []
    for facts, link in known(first_of_nodes(ranks), "link"):
        port, best = _port_in_use(facts), max(link["out"], link["in"])
        if port and port["rate"] and best < SLOWER_THAN_SAID * port["rate"]:
            some.append((facts, port, best))
    if not some:
        return
    facts, port, best = min(some, key=lambda found: found[2])
    text = (
        f"{bytes_text(best)}/s through {port['name']} of {on_hosts([facts for facts, *_ in some])}, "
        f"which is a link of {bytes_text(port['rate'])}/s"
    )
    fix = "look who else uses the network, and whether MPI takes the fast path (UCX_NET_DEVICES; RDMA, not TCP)"
    yield Finding(SLOW, "network", text, fix)


def idle_infiniband(ranks, model):
    """InfiniBand is there, and what the ranks sent went over Ethernet."""
    some = []
    for facts in first_of_nodes(ranks):
        cards = [port["name"] for port in facts.get("interfaces", []) if port["kind"] == "infiniband"]
        port = _port_in_use(facts) if "link" in facts else None
        if cards and port and port["kind"] == "ethernet":
            some.append((facts, port["name"], cards[0]))
    if not some:
        return
    facts, used, idle = some[0]
    text = f"MPI on {on_hosts([facts for facts, *_ in some])} sends through {used}, and {idle} is idle"
    fix = "use the site's MPI, built with UCX or verbs (one from PyPI may lack them); Open MPI: --mca pml ucx"
    yield Finding(SLOW, "network", text, fix)


def _port_in_use(facts):
    """The interface that most of what the probe has sent left through; None where none or no one stands out."""
    traffic = facts.get("traffic", {})
    total = sum(traffic.values())
    name = next((name for name, count in traffic.items() if total and count > MOSTLY * total), None)
    return next((port for port in facts.get("interfaces", []) if port["name"] == name), None)


CHECKS = (clocks, slow_ports, slow_latency, slower_than_said, idle_infiniband)
