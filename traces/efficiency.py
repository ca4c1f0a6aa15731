"""POP's efficiencies of a run: how much of its time is useful computing, and what the rest is lost to.

Definitions: the POP Centre of Excellence's standard metrics for parallel performance (co-design.pop-coe.eu/metrics).
Useful is what a rank spends in forward, backward and update. With u_i a rank's useful seconds, T the runtime and
T_ideal the runtime on a network that takes no time:

    load balance   mean(u) / max(u)          serialization   max(u) / T_ideal      transfer   T_ideal / T
    communication  serialization * transfer = max(u) / T     parallel   load balance * communication = mean(u) / T

T_ideal comes from replaying the recorded steps: what a rank does between two exchanges takes as long as it did, an
exchange lasts until those it waits for have come and no longer.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from traces.analysis import StepTimes
from traces.phases import COMPUTE, INDEX
from traces.runs import Run
from traces.wait_states import SYNCHRONIZING

_IS_SYNCHRONIZING = np.isin(np.arange(len(INDEX)), [INDEX[name] for name in SYNCHRONIZING])


@dataclass(frozen=True)
class Efficiency:
    """useful_s: (R,) float64; runtime_s, ideal_s: over the same steps; tokens: trained on in them, None if unknown."""

    useful_s: np.ndarray
    runtime_s: float
    ideal_s: float
    tokens: float | None = None

    @property
    def load_balance(self) -> float:
        return float(self.useful_s.mean() / self.useful_s.max())

    @property
    def serialization(self) -> float:
        return float(self.useful_s.max() / self.ideal_s)

    @property
    def transfer(self) -> float:
        return self.ideal_s / self.runtime_s

    @property
    def communication(self) -> float:
        return self.serialization * self.transfer

    @property
    def parallel(self) -> float:
        return self.load_balance * self.communication

    @property
    def lost(self) -> dict[str, float]:
        """Shares of the runtime that are not useful, by cause; with the parallel efficiency they add up to 1."""
        longest = float(self.useful_s.max())
        seconds = {
            "load_balance": longest - float(self.useful_s.mean()),
            "serialization": self.ideal_s - longest,
            "transfer": self.runtime_s - self.ideal_s,
        }
        return {name: value / self.runtime_s for name, value in seconds.items()}

    def as_dict(self) -> dict:
        names = ("load_balance", "serialization", "transfer", "communication", "parallel")
        return {name: getattr(self, name) for name in names} | {"lost": self.lost}


def efficiency(run: Run, times: StepTimes) -> Efficiency:
    """Of all measured steps together. The update of a sharded optimizer is useful on each of its ranks."""
    useful_s = times.seconds[:, :, [INDEX[name] for name in COMPUTE]].sum(axis=(0, 2))
    runtime_s = float(step_runtimes(times).sum())
    # Clocks that differ by microseconds may make a replayed step longer than the step.
    ideal_s = min(float(ideal_runtimes(run, times).sum()), runtime_s)
    kept = set(times.steps.tolist())
    tokens = [row["tokens_per_s"] * row["step_s"] for row in run.log if row["step"] in kept and "tokens_per_s" in row]
    return Efficiency(useful_s, runtime_s, max(ideal_s, float(useful_s.max())), sum(tokens) or None)


def scaling(runs: list[Efficiency]) -> list[dict[str, float]]:
    """How each run compares with the first, per token: runs may differ in ranks and in their batch.

    computation: useful seconds a token of all ranks together, first over this; global: computation * parallel
    efficiency; speedup: tokens a second over the first's. ValueError where a run's tokens are not known.
    """
    if any(one.tokens is None for one in runs):
        raise ValueError("scaling compares seconds per token, and a run's log has no tokens")
    first = runs[0]
    rows = []
    for one in runs:
        computation = float((first.useful_s.sum() / first.tokens) / (one.useful_s.sum() / one.tokens))
        speedup = (one.tokens / one.runtime_s) / (first.tokens / first.runtime_s)
        rows.append({"computation": computation, "global": computation * one.parallel, "speedup": speedup})
    return rows


def step_runtimes(times: StepTimes) -> np.ndarray:
    """(S,) seconds from the first rank's start of a step to the last rank's end of it."""
    return (times.end_ns.max(axis=1) - times.start_ns.min(axis=1)) * 1e-9


def ideal_runtimes(run: Run, times: StepTimes) -> np.ndarray:
    """(S,) seconds of each step if moving data took no time; all ranks begin it together."""
    per_rank = [_segments(run, times, place) for place in range(len(run.ranks))]
    result = np.zeros(len(times.steps))
    for steps in _alike(per_rank):
        ranks = [[segments[step] for step in steps] for segments in per_rank]
        numbers = [trace.identity["rank"] for trace in run.ranks]
        result[steps] = Replay([_Rank(n, rank) for n, rank in zip(numbers, ranks, strict=True)]).seconds()
    return result


@dataclass(frozen=True)
class _Segments:
    """One rank's step: the (phase, root) of its exchanges in order, and the seconds before each and after the last."""

    calls: tuple[tuple[int, int], ...]
    seconds: np.ndarray


def _segments(run: Run, times: StepTimes, place: int) -> list[_Segments]:
    """One of each measured step."""
    records = run.ranks[place].records
    records = records[_IS_SYNCHRONIZING[records["phase"]]]
    records = records[np.lexsort((records["start"], records["step"]))]
    result = []
    bounds = zip(times.steps, times.start_ns[:, place], times.end_ns[:, place], strict=True)
    for step, start, end in bounds:
        first, last = np.searchsorted(records["step"], [step, step + 1])
        own = records[first:last]
        own = own[(own["start"] >= start) & (own["end"] <= end)]
        seconds = (np.append(own["start"], end) - np.insert(own["end"], 0, start)) * 1e-9
        calls = tuple(zip(own["phase"].tolist(), own["root"].tolist(), strict=True))
        result.append(_Segments(calls, np.maximum(seconds, 0.0)))
    return result


def _alike(per_rank: list[list[_Segments]]) -> list[list[int]]:
    """Indices of the steps in groups in which every rank makes the same calls."""
    groups = defaultdict(list)
    for step in range(len(per_rank[0])):
        groups[tuple(segments[step].calls for segments in per_rank)].append(step)
    return list(groups.values())


class _Rank:
    """A rank in a replay of S steps that are alike."""

    def __init__(self, number: int, steps: list[_Segments]):
        self.number = number
        self.calls = _numbered(steps[0].calls)
        self.seconds = np.array([step.seconds for step in steps])  # (S, calls + 1)
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

    def __init__(self, ranks: list[_Rank]):
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
    def _pass(call: tuple[int, int, int], ranks: list[_Rank]) -> None:
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
