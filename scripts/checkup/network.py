"""Check the network between the nodes, with the rates that the ranks have measured."""

from scripts.checkup.report import SLOW, Problem, bytes_text

# A node is reported if its rate is below, or its latency above, this multiple of the median of all nodes.
SLOWER_PORT = 0.7
LATER = 4.0


def slow_links(ranks, model):
    """Find nodes whose port is slower than other ports, in either direction, or whose latency is higher."""
    leaders = ranks.leaders
    for way, verb in (("out", "sends"), ("in", "receives")):
        slow, usual = leaders.far_from_median(f"link/{way}", lambda rate, usual: rate < SLOWER_PORT * usual)
        if slow:
            worst = min(slow.values(f"link/{way}"))
            rates = f"{worst / usual:.0%} of the others' rate ({bytes_text(worst)}/s of {bytes_text(usual)}/s)"
            fix = "look at its cable, port and switch (ethtool, ibstat), and at who else uses it; or leave the host out"
            yield Problem(SLOW, "network", f"{slow.hosts} {verb} at {rates}: every exchange waits for it", fix)
    late, usual = leaders.far_from_median("link/latency_s", lambda latency, usual: latency > LATER * usual)
    if late:
        worst = max(late.values("link/latency_s"))
        text = f"{worst * 1e3:.3g} ms of latency at {late.hosts}, {usual * 1e3:.3g} ms elsewhere"
        yield Problem(SLOW, "network", text, "see whether it is behind another switch, or busy; or leave the host out")


def idle_infiniband(ranks, model):
    """Find nodes that have InfiniBand or RoCE but send through Ethernet."""

    def idle_port(traffic: dict) -> str | None:
        """Return an InfiniBand port, such as mlx5_0:1, if most bytes left through Ethernet."""
        busiest = max(traffic, key=traffic.get, default=":")
        return None if ":" in busiest else next((port for port in traffic if ":" in port), None)

    if beside := ranks.leaders.where("link").where("traffic", idle_port):
        traffic = beside[0]["traffic"]
        text = f"MPI on {beside.hosts} sends through {max(traffic, key=traffic.get)}, and {idle_port(traffic)} is idle"
        fix = "use the site's MPI, built with UCX or verbs (one from PyPI may lack them); Open MPI: --mca pml ucx"
        yield Problem(SLOW, "network", text, fix)


CHECKS = (slow_links, idle_infiniband)
