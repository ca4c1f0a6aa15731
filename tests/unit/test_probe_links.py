"""What probing makes of its measurements: clocks, latency and rates, from times that are known."""

from types import SimpleNamespace

import pytest

from dist.probe import links
from dist.probe.streams import Rate, piece_bytes, sustained
from dist.waiting import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, Pauses

AHEAD_NS = 1_000_000


class Time:
    """A clock that stands still until it is moved. round_trips: (there, back) in ns of each question to rank 0."""

    def __init__(self, round_trips):
        self.now, self.ways = 10**9, iter(round_trips)

    def perf_counter_ns(self):
        return self.now

    def send(self, what, dest):
        there, self.back = next(self.ways)
        self.now += there
        self.theirs = self.now + AHEAD_NS

    def recv(self, source):
        self.now += self.back
        return self.theirs


def test_the_quickest_answer_tells_the_time(monkeypatch):
    """To the nanosecond where both ways take as long; by half of the round trip where they do not."""
    slow = [(40_000, 90_000)] * (links.CLOCK_ROUNDS - 1)
    for there, back in ((5_000, 5_000), (1_000, 9_000), (9_000, 1_000)):
        clock = Time([*slow[:7], (there, back), *slow[7:]])
        monkeypatch.setattr(links, "time", clock)
        answer = links._ask_time(clock)
        assert answer["error_ns"] == 5_000
        assert answer["offset_ns"] == AHEAD_NS + (there - back) // 2
        assert abs(answer["offset_ns"] - AHEAD_NS) <= answer["error_ns"]


def test_latency_is_half_of_the_shortest_round_trip(monkeypatch):
    moments = iter([0, 8e-4, 1, 1 + 2e-4, 2, 2 + 6e-4] + [3, 4] * links.ROUND_TRIPS)
    done = SimpleNamespace(Wait=lambda: None)
    leaders = SimpleNamespace(rank=0, size=3, Irecv=lambda *to: done, Isend=lambda *to: done)
    monkeypatch.setattr(links, "barrier", lambda comm: None)
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    assert links._latency(leaders) == pytest.approx(1e-4)


@pytest.mark.parametrize("rank", range(4))
def test_out_is_measured_while_one_sends_and_in_while_one_receives(rank, monkeypatch):
    rates = {(True, True): (1.0, 1.5), (True, False): (2.0, None), (False, True): (None, 3.0)}
    seen = {ways: tuple(rate and Rate(rate, True) for rate in pair) for ways, pair in rates.items()}
    monkeypatch.setattr(links, "_streams", lambda leaders, direction, sends, receives, *_: seen[sends, receives])
    assert links._rates(SimpleNamespace(rank=rank, size=4), 1, 1) == {"out": 2.0, "in": 3.0, "both": 1.0}


def test_streams_go_on_until_all_rates_have_settled(monkeypatch):
    """This rank's have from the second on, another rank's from the third on."""
    lengths = []

    def stream(leaders, to, source, seconds, size):
        lengths.append(seconds)
        assert (to, source, size) == (2, None, 77)
        return Rate(1e6 / len(lengths), len(lengths) > 1), None

    monkeypatch.setattr(links, "stream", stream)
    others = SimpleNamespace(rank=1, size=3, allreduce=lambda own, operation: own and len(lengths) > 2)
    found = links._streams(others, 1, True, False, (0.1, 0.2, 0.4, 0.8), 77)
    assert (lengths, found[0].bytes_per_s) == ([0.1, 0.2, 0.4], 1e6 / 3)


def test_a_nodes_rate_is_that_with_its_better_neighbour(monkeypatch):
    """Else a slow port would show at its neighbours as well."""
    of_direction = {1: {"out": 5.0, "in": 50.0, "both": 4.0}, -1: {"out": 50.0, "in": 5.0, "both": 40.0}}
    monkeypatch.setattr(links, "_latency", lambda leaders: 1e-4)
    monkeypatch.setattr(links, "_streams", lambda *streams: (Rate(1e3, True),) * 2)
    monkeypatch.setattr(links, "_rates", lambda leaders, size, direction: of_direction[direction])
    leaders = SimpleNamespace(size=3, allreduce=lambda value, operation: value)
    assert links._probe(leaders) == {"latency_s": 1e-4, "out": 50.0, "in": 50.0, "both": 40.0}


def pieces(rate: float, size: int, burst: float, seconds: float) -> list[tuple[float, int]]:
    """When pieces come out of a token bucket: `burst` bytes at 1 GB/s, then `rate` bytes/s."""
    count = int((burst + rate * seconds) / size)
    return [(5 + max(k * size / 1e9, (k * size - burst) / rate), size) for k in range(1, count)]


@pytest.mark.parametrize("burst", [0, 32 << 10, 2 << 20])
@pytest.mark.parametrize("rate", [1.875e6, 50e6])
def test_a_burst_does_not_count(rate, burst):
    assert sustained(pieces(rate, 8192, burst, 0.2), 0.1) == Rate(pytest.approx(rate, rel=1e-9), True)


def test_a_rate_that_changes_in_the_counted_time_has_not_settled():
    """A burst that ends in it; and where one half is not slower than SETTLED of the other, it has."""
    rates = sustained(pieces(2e6, 8192, 110e6, 0.2), 0.05)
    assert not rates.is_settled
    for second, is_settled in ((1.05e6, False), (1.55e6, True)):
        arrivals = [(k * 1e-3, 2000) for k in range(101)] + [(0.1 + k * 1e-3, second * 1e-3) for k in range(1, 101)]
        assert sustained(arrivals, 0.0).is_settled == is_settled


def test_pieces_last_a_millisecond_within_limits():
    assert [piece_bytes(rate) for rate in (1e5, 50e6, 12e9)] == [8 << 10, 50_000, 1 << 20]


def test_the_slowest_node_sets_the_sizes():
    found = [{"latency_s": 1e-4, "both": 1e9}, {"latency_s": 1e-3, "both": 4e8}]
    assert links.rate_both_ways(found) == 4e8
    assert links.bucket_bytes(found) == int(20 * 1e-3 * 4e8 * 2)


def test_pauses_grow_to_the_longest_and_begin_anew(monkeypatch):
    slept = []
    monkeypatch.setattr("dist.waiting.time", SimpleNamespace(sleep=slept.append))
    pauses = Pauses()
    for _ in range(50):
        pauses.sleep()
    pauses.happened()
    pauses.sleep()
    assert slept[0] == slept[-1] == SHORTEST_PAUSE_S
    assert slept[:-1] == sorted(slept[:-1])
    assert max(slept) == LONGEST_PAUSE_S
