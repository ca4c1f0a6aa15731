"""CallsTogether of dist/host/rooted.py: calls begin in order behind a window."""

from types import SimpleNamespace

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


def test_a_call_begins_when_fewer_than_so_many_are_under_way():
    requests, calls = Requests(), CallsTogether(most=2)
    for name in "abcd":
        calls.queue(requests.begin(name))
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
