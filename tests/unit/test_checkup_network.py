"""Which ports the doctor calls slow, and what it takes an interface's word for."""

from types import SimpleNamespace

import pytest

from scripts.checkup import network
from scripts.checkup.findings import Ranks
from scripts.checkup.network import clocks, interfaces, slow_links


def leaders(*links) -> Ranks:
    """One rank a node; a link: (out, in, seconds of latency)."""
    return Ranks(
        {"place": {"rank": node, "node": node, "host": f"n{node}"}, "link": {"out": out, "in": into, "latency_s": late}}
        for node, (out, into, late) in enumerate(links)
    )


USUAL = (100e6, 100e6, 1e-4)


@pytest.mark.parametrize(
    ("odd", "texts"),
    [
        ((71e6, 71e6, 3.9e-4), []),
        (
            (69e6, 100e6, 1e-4),
            ["n3 sends at 69% of the others' rate (69 MB/s of 100 MB/s): every exchange waits for it"],
        ),
        ((100e6, 69e6, 1e-4), ["n3 receives at 69% of the others' rate (69 MB/s of 100 MB/s): every exchange waits"]),
        ((100e6, 100e6, 4.1e-4), ["0.41 ms of latency at n3, 0.1 ms elsewhere"]),
    ],
)
def test_a_port_below_seven_tenths_is_slow_and_one_four_times_as_far_is_late(odd, texts):
    found = [finding.text for finding in slow_links(leaders(USUAL, USUAL, USUAL, odd), None)]
    assert len(found) == len(texts)
    assert all(text.startswith(start) for text, start in zip(found, texts, strict=True))


def test_of_two_nodes_nobody_can_say_which_is_odd():
    assert list(slow_links(leaders(USUAL, (1e6, 1e6, 1.0)), None)) == []


@pytest.mark.parametrize(("ahead_s", "is_off"), [(0.9, False), (1.1, True), (-1.1, True)])
def test_a_time_of_day_is_off_from_a_second_on(ahead_s, is_off):
    ranks = Ranks([{"place": {"rank": 1, "node": 1, "host": "n1"}, "clock": {"error_s": 1e-5, "ahead_s": ahead_s}}])
    found = [finding.text for finding in clocks(ranks, None)]
    assert found == ([f"the time of day on n1 is {ahead_s:+.1f} s off that of rank 0's host"] if is_off else [])


def test_an_interfaces_rate_is_in_bytes(monkeypatch):
    said = {"class/net/eth0/speed": "400", "class/net/eth1/speed": "-1"}
    said["class/infiniband/mlx5_0/ports/1/rate"] = "400 Gb/sec (4X NDR)"
    monkeypatch.setattr(network, "Ports", lambda: SimpleNamespace(names=["eth0", "eth1", "mlx5_0:1"]))
    monkeypatch.setattr(network, "text_of", lambda path: said[str(path).removeprefix("/sys/")])
    assert [(port["kind"], port["rate"]) for port in interfaces()] == [
        ("ethernet", 50e6), ("ethernet", None), ("infiniband", 50e9),
    ]  # fmt: skip
