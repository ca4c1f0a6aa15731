"""The picture of ports during an exchange, and what is cut out of their counters for it."""

from threading import Event

import numpy as np
import pytest

from scripts.makers.pages import port_figures
from scripts.makers.pages.port_figures import exchange_of, in_pieces, port_bytes
from tests.support.drawn import is_inside, title_of
from traces.plots import look, ports_in_time

pytestmark = pytest.mark.any_mpi
RATE = 50e6  # bytes/s of a port
SWITCH = """Inter-|   Receive                                   |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:  100       1    0    0    0     0          0         0   100       1    0    0    0     0       0          0
switch: 9000       9    0    0    0     0          0         0  9000       9    0    0    0     0       0          0
 node1: 3000       3    0    0    0     0          0         0   700       1    0    0    0     0       0          0
 node0:  500       1    0    0    0     0          0         0  4000       4    0    0    0     0       0          0
"""


def test_what_the_switch_sends_goes_into_a_node():
    assert port_bytes(SWITCH).tolist() == [[4000, 500], [700, 3000]]
    assert port_bytes("  eth0: 1 0 0 0 0 0 0 0 2 0 0 0 0 0 0 0\n").shape == (0, 2)


def counted(*stretches, every_s=0.005):
    """Samples of two nodes: in each stretch of (seconds, part of its rate) node 1 sends to node 0."""
    samples, passed, now = [(0.0, np.zeros((1, 2)))], 0.0, 0.0  # a node was not there yet
    for seconds, part in stretches:
        for _ in range(round(seconds / every_s)):
            now, passed = now + every_s, passed + part * RATE * every_s
            samples.append((now, np.array([[passed, 0.0], [0.0, passed]])))
    return samples


def test_the_last_exchange_is_cut_out_of_the_samples():
    """One that does not count, a pause, one that has a gap, and what barriers send around it."""
    before, exchange, after = [(0.3, 1), (0.1, 0.001)], [(0.1, 1), (0.05, 0), (0.1, 0.5)], [(0.2, 0.001)]
    samples = counted(*before, *exchange, *after)
    samples.append((samples[-1][0] + 0.005, samples[-1][1] * [[0.5, 1], [1, 1]]))  # a port that is being removed
    seconds, counts = exchange_of(samples, 2 * 0.15 * RATE)
    assert seconds[0] == pytest.approx(0.4, abs=0.006)
    assert seconds[-1] == pytest.approx(0.65, abs=0.006)
    piece_s, passed = in_pieces(seconds, counts)
    assert len(passed) * piece_s == pytest.approx(seconds[-1] - seconds[0])
    assert passed.sum(axis=0) == pytest.approx(counts[-1] - counts[0])
    used = passed / (piece_s * RATE)
    assert used.shape[1:] == (2, 2)
    assert used[:4, 0, 0] == pytest.approx(1, abs=0.05)
    assert used[6, 0, 0] == pytest.approx(0, abs=0.05)
    assert used[9:12, 1, 1] == pytest.approx(0.5, abs=0.05)
    assert not used[:, 0, 1].any()
    assert not used[:, 1, 0].any()


def test_samples_without_an_exchange_are_refused():
    with pytest.raises(ValueError, match="expected an exchange of 16000000 bytes: run it again"):
        exchange_of(counted((0.1, 0.1)), 16e6)
    with pytest.raises(ValueError, match="1 samples of no port"):
        exchange_of([(0.0, np.zeros((0, 2)))], 16e6)


def test_sampling_sees_the_cluster_until_it_ends(monkeypatch, tmp_path):
    """The head's counters are read; where they are gone the samples end, and nothing is raised."""
    texts = iter([SWITCH, SWITCH.replace("4000", "5000")])

    def read(path):
        assert str(path) == "/proc/77/net/dev"
        text = next(texts, None)
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(port_figures, "own_head", iter([None, 77]).__next__)
    monkeypatch.setattr(port_figures.Path, "read_text", read)
    samples = []
    port_figures.sample(samples, Event())
    assert [counts[0, 0] for _, counts in samples] == [4000, 5000]


def exchange(name, used, seconds=0.5):
    return {"name": name, "seen": "all into one port, then all out of it", "bytes": 8e6, "seconds": seconds,
            "bound_s": 0.25, "piece_s": 0.02, "used": np.array(used, float)}  # fmt: skip


FACTS = {
    "mpi_library": "MPICH Version: 5.0.2",
    "machine": {"processor": "AMD EPYC", "cores": 2},
    "ranks": 9,
    "rate": RATE,
}


@pytest.fixture
def figure():
    """Two nodes: one receives all while the other sends, then both do both, the counters a little above the rate."""
    return ports_in_time.draw(
        [exchange("reduce-bcast", [[[1, 0], [0, 1]]] * 20), exchange("ring", [[[1.1, 1], [1, 1]]] * 10, 0.2)], FACTS
    )


def test_ports_are_drawn_as_full_as_they_were(figure):
    assert title_of(figure) == "reduce-bcast uses 50% of what the ports can carry, ring 100%"
    assert is_inside(figure)
    server, ring = figure.axes
    heights = {}
    for area in server.collections:
        box = area.get_datalim(server.transData)
        heights.setdefault(look.matplotlib.colors.to_hex(area.get_facecolor()[0]).upper(), []).append(box.height)
    assert heights[look.BLUE] == pytest.approx([ports_in_time.HALF, 0])
    assert heights[look.ORANGE] == pytest.approx([0, ports_in_time.HALF])
    assert server.get_xlim() == ring.get_xlim()
    assert max(area.get_datalim(ring.transData).x1 for area in ring.collections) == pytest.approx(200)
    assert [label.get_text() for label in ring.get_yticklabels()] == ["node 0", "node 1"]


def test_a_panel_says_what_the_exchange_takes(figure):
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["all into one port, then all out of it", "500 ms, 2.00 times the bound, 50% of the ports in use"]


def test_many_nodes_and_long_names_stay_in_the_picture():
    used = np.full((90, 16, 2), 0.3)
    assert is_inside(ports_in_time.draw([exchange("hierarchical-sharded", used, 12.5)] * 5, FACTS))
