"""The network between the nodes: what its ports say of themselves, and what the ranks have measured of it."""

from pathlib import Path

from dist.control_groups import text_of
from dist.probe.ports import Ports
from scripts.checkup.findings import NOTE, SLOW, Finding, Ranks, bytes_text

GBIT = 1e9 / 8  # bytes
TIME_OF_DAY_S = 1.0
SLOWER_PORT, SLOWER_THAN_SAID, LATER = 0.7, 0.5, 4.0
DIRECTIONS = {"out": "sends", "in": "receives"}
MOSTLY = 0.5


def interfaces() -> list[dict]:
    """{"name", "rate": bytes/s that it says it does, None if it does not, "kind": "ethernet" or "infiniband"}."""
    found = []
    for name in Ports().names:
        device, _, port = name.partition(":")  # of InfiniBand, mlx5_0:1
        if port:  # "400 Gb/sec (4X NDR)"
            words = text_of(Path(f"/sys/class/infiniband/{device}/ports/{port}/rate")).split()
            found.append({"name": name, "rate": float(words[0]) * GBIT if words else None, "kind": "infiniband"})
        else:  # Mbit/s; -1, or not to be read, where it is not known
            text = text_of(Path(f"/sys/class/net/{name}/speed"))
            rate = int(text) * GBIT / 1000 if text.isdecimal() and int(text) else None
            found.append({"name": name, "rate": rate, "kind": "ethernet"})
    return found


def clocks(ranks, model):
    """Find hosts whose time of day is off."""
    if ahead := ranks.where("clock/ahead_s", lambda seconds: abs(seconds) > TIME_OF_DAY_S):
        most = max(ahead.values("clock/ahead_s"), key=abs)
        text = f"the time of day on {ahead.hosts} is {most:+.1f} s off that of rank 0's host"
        fix = "start chronyd there; logs and files carry wrong times, and authentication (munge) ends at some minutes"
        yield Finding(NOTE, "clocks", text, fix)


def slow_links(ranks, model):
    """Find nodes whose port is slower than the others', by direction, or that are farther away."""
    leaders = ranks.leaders
    for way, verb in DIRECTIONS.items():
        slow, usual = leaders.far_from_median(f"link/{way}", lambda rate, usual: rate < SLOWER_PORT * usual)
        if slow:
            worst = min(slow.values(f"link/{way}"))
            rates = f"{worst / usual:.0%} of the others' rate ({bytes_text(worst)}/s of {bytes_text(usual)}/s)"
            fix = "look at its cable, port and switch (ethtool, ibstat), and at who else uses it; or leave the host out"
            yield Finding(SLOW, "network", f"{slow.hosts} {verb} at {rates}: every exchange waits for it", fix)
    late, usual = leaders.far_from_median("link/latency_s", lambda latency, usual: latency > LATER * usual)
    if late:
        worst = max(late.values("link/latency_s"))
        text = f"{worst * 1e3:.3g} ms of latency at {late.hosts}, {usual * 1e3:.3g} ms elsewhere"
        yield Finding(SLOW, "network", text, "look whether it is behind another switch, or busy; or leave the host out")


def ports(ranks, model):
    """Find links far below what the interface in use says of itself, and InfiniBand that is there and idle."""
    using = Ranks(
        facts | {"port": _port_in_use(facts), "best": max(facts["link"]["out"], facts["link"]["in"])}
        for facts in ranks.leaders.where("link")
    )
    slow = Ranks(
        facts for facts in using.where("port/rate") if facts["best"] < facts["port"]["rate"] * SLOWER_THAN_SAID
    )
    if slow:
        slowest = min(slow, key=lambda facts: facts["best"])
        best, said = bytes_text(slowest["best"]), bytes_text(slowest["port"]["rate"])
        text = f"{best}/s through {slowest['port']['name']} of {slow.hosts}, which is a link of {said}/s"
        fix = "look who else uses the network, and whether MPI takes the fast path (UCX_NET_DEVICES; RDMA, not TCP)"
        yield Finding(SLOW, "network", text, fix)
    if beside := using.where("port/kind", lambda kind: kind == "ethernet").where("interfaces", infiniband_cards):
        used, idle = beside[0]["port"]["name"], infiniband_cards(beside[0]["interfaces"])[0]
        text = f"MPI on {beside.hosts} sends through {used}, and {idle} is idle"
        fix = "use the site's MPI, built with UCX or verbs (one from PyPI may lack them); Open MPI: --mca pml ucx"
        yield Finding(SLOW, "network", text, fix)


def _port_in_use(facts: dict) -> dict | None:
    """Return the interface that most of the probe's bytes left through; None where none stands out."""
    traffic = facts.get("traffic", {})
    total = sum(traffic.values())
    found = (port for port in facts.get("interfaces", []) if traffic.get(port["name"], 0) > MOSTLY * total)
    return next(found, None)


def infiniband_cards(ports: list[dict]) -> list[str]:
    """Return the names of a node's InfiniBand ports."""
    return [port["name"] for port in ports if port["kind"] == "infiniband"]


SECTIONS = {"interfaces": interfaces}
CHECKS = (clocks, slow_links, ports)
