"""Which ports the doctor calls slow."""

import pytest

from scripts.checkup.facts import RankFacts
from scripts.checkup.network import slow_links


def leaders(*links) -> RankFacts:
    """One rank a node; a link: (out, in, seconds of latency)."""
    return RankFacts(
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
