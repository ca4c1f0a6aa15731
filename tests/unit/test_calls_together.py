"""CallsTogether of dist/host/rooted.py: calls begin in order behind a window, and the end of each is told at once."""

from types import SimpleNamespace

import pytest

from dist.host import rooted
from dist.host.rooted import CallsTogether


class Requests:
    """begin(name) gives a request that is complete once its name is in `complete`."""

    def __init__(self):
        self.begun, self.complete = [], set()

    def begin(self, name):
        def call():
            self.begun.append(name)
            return SimpleNamespace(Test=lambda: name in self.complete)

        return call


class Told:
    """As CallsTogether's notice: what it heard, in its order."""

    def __init__(self):
        self.heard = []

    def __call__(self, name, size, root):
        self.heard.append(("begins", name, size, root))
        return SimpleNamespace(ended=lambda: self.heard.append(("ends", name)))


@pytest.fixture
def requests(monkeypatch):
    monkeypatch.setattr(rooted, "LOOK_NS", 0)
    return Requests()


def queued(requests, names, most, told=None):
    calls = CallsTogether(most, told)
    for root, name in enumerate(names):
        calls.queue(requests.begin(name), name, 10 * root, root)
    return calls


def test_a_call_begins_when_fewer_than_so_many_are_under_way(requests):
    calls = queued(requests, "abcd", most=2)
    assert not calls.are_done(1)
    assert requests.begun == ["a", "b"]
    requests.complete = {"a"}
    assert calls.are_done(1)
    assert not calls.are_done(2)
    assert requests.begun == ["a", "b", "c"]
    requests.complete = set("abcd")
    while not calls.are_done(4):
        pass
    assert requests.begun == [*"abcd"]


def test_an_end_is_told_when_it_comes_also_behind_a_call_that_goes_on(requests):
    told = Told()
    calls = queued(requests, "abc", most=3, told=told)
    assert not calls.are_done(3)
    assert told.heard == [("begins", "a", 0, 0), ("begins", "b", 10, 1), ("begins", "c", 20, 2)]
    for ending in "cab":
        del told.heard[:]
        requests.complete.add(ending)
        assert calls.are_done(3) == (ending == "b")
        assert told.heard == [("ends", ending)]
    assert calls.are_done(3)
    assert told.heard == [("ends", "b")], "told once"


def test_between_two_looks_the_first_one_alone_is_tested(requests, monkeypatch):
    told = Told()
    calls = queued(requests, "ab", most=2, told=told)
    calls.are_done(2)
    monkeypatch.setattr(rooted, "LOOK_NS", 1 << 62)
    requests.complete = {"b"}
    assert not calls.are_done(2)
    assert ("ends", "b") not in told.heard
    requests.complete = {"a", "b"}
    assert calls.are_done(2)
    assert told.heard[-2:] == [("ends", "a"), ("ends", "b")]
