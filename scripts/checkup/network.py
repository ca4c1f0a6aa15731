"""The network between the nodes, as the ranks have measured it."""

from scripts.checkup.report import SLOW, Problem, bytes_text

# Ratios to the median of all nodes: of a rate, of a latency.
SLOWER_PORT = 0.7
LATER = 4.0


def slow_links(ranks, model):
    """Find nodes whose port is slower than the others', in either direction, or whose latency is higher."""
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
        yield Problem(SLOW, "network", text, "look whether it is behind another switch, or busy; or leave the host out")


def idle_infiniband(ranks, model):
    """Find nodes that send through Ethernet although they have InfiniBand or RoCE."""
    if beside := ranks.leaders.where("link").where("traffic", _passes_infiniband):
        traffic = beside[0]["traffic"]
        idle = next(filter(_is_infiniband, traffic))
        text = f"MPI on {beside.hosts} sends through {max(traffic, key=traffic.get)}, and {idle} is idle"
        fix = "use the site's MPI, built with UCX or verbs (one from PyPI may lack them); Open MPI: --mca pml ucx"
        yield Problem(SLOW, "network", text, fix)


def _passes_infiniband(traffic: dict) -> bool:
    """Return whether most of the measurement's bytes left through Ethernet although there is InfiniBand."""
    return any(map(_is_infiniband, traffic)) and not _is_infiniband(max(traffic, key=traffic.get))


def _is_infiniband(port: str) -> bool:
    return ":" in port  # mlx5_0:1


CHECKS = (slow_links, idle_infiniband)
