"""The recorded steps once more, on a network that takes no time.

What a rank does between two exchanges takes as long as it did; an exchange lasts until those it waits for have come,
and no longer. POP's ideal runtime (efficiency.py); what a step was longer is what moving data cost.
"""

from collections import defaultdict
from functools import cached_property

import numpy as np

from traces.read.analysis import StepTimes, cells
from traces.read.runs import Run
from traces.read.wait_states import SYNCHRONIZING
from traces.record.phases import INDEX, NAMES

_IS_SYNCHRONIZING = np.isin(np.arange(len(NAMES)), [INDEX[name] for name in SYNCHRONIZING])


def ideal_runtimes(run: Run, times: StepTimes) -> np.ndarray:
    """(S,) seconds of each step if moving data took no time; all ranks begin it together."""
    ranks = [_RankCalls(run, times, place) for place in range(len(run.ranks))]
    result = np.zeros(len(times.steps))
    for steps in _alike(ranks):
        result[steps] = Replay([_Replayed(rank, steps) for rank in ranks]).seconds()
    return result


class _RankCalls:
    """One rank's exchanges, step by step, each with the time it came after the one before."""

    def __init__(self, run: Run, times: StepTimes, place: int):
        records = run.ranks[place].records
        start, end = times.start_ns[:, place], times.end_ns[:, place]
        cell = cells(records, times.steps, start, end)
        step = np.where(_IS_SYNCHRONIZING[records["phase"]], cell // len(NAMES), len(times.steps))
        order = np.lexsort((records["start"], step))
        self.records = records[order[: (step < len(times.steps)).sum()]]
        self.first = np.searchsorted(step[order], np.arange(len(times.steps) + 1))
        self.number, self.start, self.end = run.ranks[place].identity["rank"], start, end
        self._kinds = self.records[["phase", "root"]].tolist()

    def calls(self, step: int) -> tuple[tuple[int, int], ...]:
        """The (phase, root) of each call in the step of this index."""
        return tuple(self._kinds[self.first[step] : self.first[step + 1]])

    def seconds(self, steps: list[int]) -> np.ndarray:
        """(S, calls + 1): what the rank did before each call and after the last, of steps with as many calls."""
        count = self.first[steps[0] + 1] - self.first[steps[0]]
        own = self.records[self.first[steps][:, None] + np.arange(count)]
        begins = np.column_stack([self.start[steps], own["end"]])
        ends = np.column_stack([own["start"], self.end[steps]])
        return np.maximum(ends - begins, 0) * 1e-9


def _alike(ranks: list[_RankCalls]) -> list[list[int]]:
    """Indices of the steps in groups in which every rank makes the same calls."""
    groups = defaultdict(list)
    for step in range(len(ranks[0].start)):
        groups[tuple(rank.calls(step) for rank in ranks)].append(step)
    return list(groups.values())


class _Replayed:
    """A rank in a replay of S steps that are alike."""

    def __init__(self, rank: _RankCalls, steps: list[int]):
        self.number = rank.number
        self.calls = _numbered(rank.calls(steps[0]))
        self.seconds = rank.seconds(steps)
        self.done = 0
        self.clock = self.seconds[:, 0]

    @property
    def next_call(self):
        return self.calls[self.done] if self.done < len(self.calls) else None

    def leave(self, moment: np.ndarray) -> None:
        self.done += 1
        self.clock = moment + self.seconds[:, self.done]


def _numbered(calls) -> list[tuple[int, int, int]]:
    """Each (phase, root) with how many equal ones came before it: equal on the ranks that meet in one call."""
    seen = defaultdict(int)
    result = []
    for call in calls:
        result.append((*call, seen[call]))
        seen[call] += 1
    return result


class Replay:
    """Steps that are alike, on a network that takes no time."""

    def __init__(self, ranks: list[_Replayed]):
        self.ranks = ranks

    @cached_property
    def _members(self) -> dict:
        """How many ranks take part in each call."""
        members = defaultdict(int)
        for rank in self.ranks:
            for call in rank.calls:
                members[call] += 1
        return members

    def seconds(self) -> np.ndarray:
        """(S,) until the last rank has ended."""
        while waiting := self._by_call():
            # Ranks that made other calls than the rest (a torn trace) must not hold the replay up.
            complete = [call for call, ranks in waiting.items() if len(ranks) == self._members[call]]
            for call in complete or list(waiting)[:1]:
                self._pass(call, waiting[call])
        return np.max([rank.clock for rank in self.ranks], axis=0)

    def _by_call(self) -> dict:
        """The ranks that have come to each call."""
        waiting = defaultdict(list)
        for rank in self.ranks:
            if rank.next_call is not None:
                waiting[rank.next_call].append(rank)
        return waiting

    @staticmethod
    def _pass(call: tuple[int, int, int], ranks: list[_Replayed]) -> None:
        """All leave a call: who must wait for others, when they have come."""
        phase, root, _ = call
        last = np.max([rank.clock for rank in ranks], axis=0)
        at_root = next((rank.clock for rank in ranks if rank.number == root), None)
        for rank in ranks:
            moment = last
            if root >= 0 and phase == INDEX["bcast"]:
                moment = rank.clock if at_root is None else np.maximum(rank.clock, at_root)
            elif root >= 0 and phase == INDEX["reduce"]:
                moment = last if rank.number == root else rank.clock
            rank.leave(moment)
