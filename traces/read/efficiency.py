"""POP's efficiencies of a run: the share of its time spent in useful computation, and the causes of the rest.

Definitions: the POP Centre of Excellence's standard metrics for parallel performance (co-design.pop-coe.eu/metrics).
Forward, backward and update are useful. With u_i a rank's useful seconds, T the runtime and T_ideal the runtime on a
network that takes no time:

    load balance   mean(u) / max(u)          serialization   max(u) / T_ideal      transfer   T_ideal / T
    communication  serialization * transfer = max(u) / T     parallel   load balance * communication = mean(u) / T

T is the sum of the steps, each the mean over ranks. The time from the first start to the last end would be wrong:
unless ranks are synchronized between steps, a rank begins its next step while others are still in this one.

T_ideal comes from a replay of the recorded steps. Work between two exchanges takes its recorded time. An exchange lasts
only until the ranks that it waits for have entered it, and a stage's receive until its sender enters the send.
"""

from collections import Counter, defaultdict

import numpy as np

from traces.read.analysis import StepTimes
from traces.read.runs import Run
from traces.read.waits import Calls, collect_calls
from traces.record.phases import COMPUTE, NAMES


def efficiency(times: StepTimes, ideal_s: np.ndarray) -> dict:
    """Return the efficiencies, as above, of all measured steps together. ideal_s: (S,) from ideal_runtimes.

    "lost": shares of the runtime by cause. With the parallel efficiency they add up to 1.
    """
    useful_s = times.phase(*COMPUTE).sum(axis=0)
    mean = float(useful_s.mean())
    longest = float(useful_s.max())
    # Ranks that exchange nothing drift apart: then the run lasts as long as the slowest rank computes.
    runtime = max(float(times.step_seconds.sum()), longest)
    # Replayed ranks begin each step together, which can make the step longer than recorded.
    ideal = max(min(float(ideal_s.sum()), runtime), longest)
    lost_s = {"load_balance": longest - mean, "serialization": ideal - longest, "transfer": runtime - ideal}
    return {
        "load_balance": mean / longest,
        "serialization": longest / ideal,
        "transfer": ideal / runtime,
        "communication": longest / runtime,
        "parallel": mean / runtime,
        "lost": {name: seconds / runtime for name, seconds in lost_s.items()},
    }


def ideal_runtimes(run: Run, times: StepTimes) -> np.ndarray:
    """Return (S,) seconds of each step if moving data took no time and all ranks began the step together."""
    calls = collect_calls(run)
    ranks = [_RankCalls(calls, times, place) for place in range(len(run.ranks))]
    # Steps in which every rank makes the same calls are replayed together, with one array operation per call.
    alike = defaultdict(list)
    for step in range(len(times.steps)):
        alike[tuple(tuple(rank.calls(step)) for rank in ranks)].append(step)
    result = np.zeros(len(times.steps))
    for steps in alike.values():
        result[steps] = _replay([_Replayed(rank, steps) for rank in ranks])
    return result


class _RankCalls:
    """One rank's exchanges and messages by step, and its own work between them."""

    def __init__(self, calls: Calls, times: StepTimes, place: int):
        self.start = times.start_ns[:, place]
        self.end = times.end_ns[:, place]
        own = np.flatnonzero(calls.place == place)
        step = times.cells[place][calls.index[own]] // len(NAMES)
        is_measured = step < len(times.steps)
        own = own[is_measured]
        self.records = calls.records[own]
        self.first = np.searchsorted(step[is_measured], np.arange(len(times.steps) + 1))
        columns = (calls.phase, calls.root, calls.group, calls.is_awaited, calls.waits)
        self._calls = list(zip(*(column[own].tolist() for column in columns), strict=True))

    def calls(self, step: int) -> list[tuple[int, int, int, bool, bool]]:
        """Return (phase, root, group, is_awaited, waits) of each call in the step of this index, as in Calls."""
        return self._calls[self.first[step] : self.first[step + 1]]

    def seconds(self, steps: list[int]) -> np.ndarray:
        """Return (S, calls + 1) seconds of work before, between and after calls. The steps have equally many calls."""
        count = self.first[steps[0] + 1] - self.first[steps[0]]
        own = self.records[self.first[steps][:, None] + np.arange(count)]
        begins = np.column_stack([self.start[steps], own["end"]])
        ends = np.column_stack([own["start"], self.end[steps]])
        return np.maximum(ends - begins, 0) * 1e-9


class _Replayed:
    """A rank in a replay of S steps that are alike. clock: (S,) seconds since each step's start.

    missing: {call: number of awaited ranks that have not entered}. latest: {call: (S,) when the last of them entered}.
    """

    def __init__(self, rank: _RankCalls, steps: list[int]):
        self.seconds = rank.seconds(steps)
        self.clock = self.seconds[:, 0]
        self.done = 0
        # With the number of earlier equal calls, a call becomes the same tuple on all ranks that take part in it.
        seen = Counter()
        self.calls = []
        for *kind, is_awaited, waits in rank.calls(steps[0]):
            self.calls.append(((*kind, seen[*kind]), is_awaited, waits))
            seen[*kind] += 1

    def enter(self, missing: Counter, latest: dict) -> None:
        """Enter the next call."""
        call, is_awaited, _ = self.calls[self.done]
        if is_awaited:
            missing[call] -= 1
            latest[call] = np.maximum(latest.get(call, 0.0), self.clock)

    def may_leave(self, missing: Counter) -> bool:
        """Return whether all ranks that the call waits for have entered it."""
        call, _, waits = self.calls[self.done]
        return not waits or not missing[call]

    def leave(self, missing: Counter, latest: dict) -> None:
        """Leave the call, work, and enter the next one."""
        call, _, waits = self.calls[self.done]
        moment = np.maximum(self.clock, latest.get(call, 0.0)) if waits else self.clock
        self.done += 1
        self.clock = moment + self.seconds[:, self.done]
        if self.done < len(self.calls):
            self.enter(missing, latest)


def _replay(ranks: list[_Replayed]) -> np.ndarray:
    """Return (S,) seconds until the last rank ends its step, on a network that takes no time."""
    missing = Counter(call for rank in ranks for call, is_awaited, _ in rank.calls if is_awaited)
    latest = {}
    going = [rank for rank in ranks if rank.calls]
    for rank in going:
        rank.enter(missing, latest)
    while going:
        free = [rank for rank in going if rank.may_leave(missing)]
        # A call that other ranks do not match (a torn trace) must not stop the replay.
        for rank in free or going[:1]:
            rank.leave(missing, latest)
        going = [rank for rank in going if rank.done < len(rank.calls)]
    return np.max([rank.clock for rank in ranks], axis=0)
