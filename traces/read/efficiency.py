"""POP's efficiencies of a run: the share of its time that is useful computing, and the causes of the rest.

Definitions: the POP Centre of Excellence's standard metrics for parallel performance (co-design.pop-coe.eu/metrics).
Forward, backward and update are useful. With u_i a rank's useful seconds, T the runtime and T_ideal the runtime on a
network that takes no time:

    load balance   mean(u) / max(u)          serialization   max(u) / T_ideal      transfer   T_ideal / T
    communication  serialization * transfer = max(u) / T     parallel   load balance * communication = mean(u) / T

T is the sum of the steps, each the mean over ranks. The time from the first start to the last end would not do:
unless ranks are synchronized between steps, a rank begins its next step while others are still in this one.

T_ideal comes from a replay of the recorded steps. Work between two exchanges takes as long as it did. An exchange lasts
only until the ranks that it waits for have entered it, and a stage's receive until its sender enters the send.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes, cells
from traces.read.runs import Run
from traces.read.waits import SYNCHRONIZING, groups
from traces.record.phases import COMPUTE, INDEX, NAMES, PIPELINE

_IS_SYNCHRONIZING = np.isin(np.arange(len(NAMES)), [INDEX[name] for name in (*SYNCHRONIZING, *PIPELINE)])
SEND, RECV = (INDEX[name] for name in PIPELINE)


@dataclass(frozen=True)
class Efficiency:
    """The efficiencies, as above. useful_s: (R,) float64. runtime_s, ideal_s: sums over the same steps.

    lost: shares of the runtime by cause. With the parallel efficiency they add up to 1.
    """

    useful_s: np.ndarray
    runtime_s: float
    ideal_s: float
    load_balance: float
    serialization: float
    transfer: float
    communication: float
    parallel: float
    lost: dict[str, float]

    def as_dict(self) -> dict:
        names = ("load_balance", "serialization", "transfer", "communication", "parallel", "lost")
        return {name: getattr(self, name) for name in names}


def efficiency(times: StepTimes, ideal_s: np.ndarray) -> Efficiency:
    """Return the efficiencies of all measured steps together. ideal_s: (S,) from ideal_runtimes."""
    useful_s = times.seconds[:, :, [INDEX[name] for name in COMPUTE]].sum(axis=(0, 2))
    mean = float(useful_s.mean())
    longest = float(useful_s.max())
    # Ranks that exchange nothing drift apart: then the run is as long as the slowest one computes.
    runtime = max(float(times.step_seconds.sum()), longest)
    # Replayed ranks begin each step together, which may take longer than the step did.
    ideal = max(min(float(ideal_s.sum()), runtime), longest)
    lost_s = {"load_balance": longest - mean, "serialization": ideal - longest, "transfer": runtime - ideal}
    return Efficiency(
        useful_s=useful_s,
        runtime_s=runtime,
        ideal_s=ideal,
        load_balance=mean / longest,
        serialization=longest / ideal,
        transfer=ideal / runtime,
        communication=longest / runtime,
        parallel=mean / runtime,
        lost={name: seconds / runtime for name, seconds in lost_s.items()},
    )


def ideal_runtimes(run: Run, times: StepTimes) -> np.ndarray:
    """Return (S,) seconds of each step if moving data took no time and all ranks began the step together."""
    ranks = [_RankCalls(run, times, place) for place in range(len(run.ranks))]
    # Steps in which every rank makes the same calls are replayed together, with one array operation for a call.
    alike = defaultdict(list)
    for step in range(len(times.steps)):
        alike[tuple(rank.calls(step) for rank in ranks)].append(step)
    result = np.zeros(len(times.steps))
    for steps in alike.values():
        result[steps] = _replay([_Replayed(rank, steps) for rank in ranks])
    return result


class _RankCalls:
    """One rank's exchanges and messages by step, and its own work between them."""

    def __init__(self, run: Run, times: StepTimes, place: int):
        records = run.ranks[place].records
        start = times.start_ns[:, place]
        end = times.end_ns[:, place]
        cell = cells(records, times.steps, start, end)
        step = np.where(_IS_SYNCHRONIZING[records["phase"]], cell // len(NAMES), len(times.steps))
        order = np.lexsort((records["start"], step))
        self.records = records[order[: (step < len(times.steps)).sum()]]
        self.first = np.searchsorted(step[order], np.arange(len(times.steps) + 1))
        self.number = run.ranks[place].identity["rank"]
        self.start = start
        self.end = end
        # The group of a message is this rank: with the root, it names both ends.
        group = groups(run)[self.records["phase"], place]
        group = np.where(np.isin(self.records["phase"], (SEND, RECV)), self.number, group)
        self._kinds = list(
            zip(*(each.tolist() for each in (self.records["phase"], self.records["root"], group)), strict=True)
        )

    def calls(self, step: int) -> tuple[tuple[int, int, int], ...]:
        """Return the (phase, root, group) of each call in the step of this index."""
        return tuple(self._kinds[self.first[step] : self.first[step + 1]])

    def seconds(self, steps: list[int]) -> np.ndarray:
        """Return (S, calls + 1) seconds of work before each call and after the last. steps: with equally many calls."""
        count = self.first[steps[0] + 1] - self.first[steps[0]]
        own = self.records[self.first[steps][:, None] + np.arange(count)]
        begins = np.column_stack([self.start[steps], own["end"]])
        ends = np.column_stack([own["start"], self.end[steps]])
        return np.maximum(ends - begins, 0) * 1e-9


class _Replayed:
    """A rank in a replay of S steps that are alike. clock: (S,) seconds since each step's start."""

    def __init__(self, rank: _RankCalls, steps: list[int]):
        self.number = rank.number
        self.seconds = rank.seconds(steps)
        self.clock = self.seconds[:, 0]
        self._done = 0
        # With the count of equal calls before it, a call is the same tuple on all ranks that meet in it.
        seen = Counter()
        self.calls = []
        for call in rank.calls(steps[0]):
            self.calls.append((*call, seen[call]))
            seen[call] += 1

    @property
    def next_call(self) -> tuple[int, int, int, int] | None:
        return self.calls[self._done] if self._done < len(self.calls) else None

    def leave(self, moment: np.ndarray) -> None:
        self._done += 1
        self.clock = moment + self.seconds[:, self._done]


def _replay(ranks: list[_Replayed]) -> np.ndarray:
    """Return (S,) seconds until the last rank ends its step, on a network that takes no time."""
    members = Counter(call for rank in ranks for call in rank.calls)
    sent = {}
    while True:
        waiting = defaultdict(list)
        for rank in ranks:
            if rank.next_call is not None:
                waiting[rank.next_call].append(rank)
        if not waiting:
            return np.max([rank.clock for rank in ranks], axis=0)
        # A call that other ranks do not match (a torn trace) must not stop the replay.
        complete = [
            call for call, present in waiting.items()
            if len(present) == members[call] and (call[0] != RECV or _send_of(call) in sent)
        ]  # fmt: skip
        for call in complete or list(waiting)[:1]:
            _pass(call, waiting[call], sent)


def _send_of(call: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the send that belongs to a receive."""
    _, sender, receiver, order = call
    return SEND, receiver, sender, order


def _pass(call: tuple[int, int, int, int], ranks: list[_Replayed], sent: dict) -> None:
    """Let all ranks leave a call once those they wait for have entered. sent: {send: when it began}."""
    phase, root, *_ = call
    if phase in (SEND, RECV):
        (rank,) = ranks
        if phase == SEND:
            sent[call] = rank.clock
        return rank.leave(np.maximum(rank.clock, sent.get(_send_of(call), 0.0)) if phase == RECV else rank.clock)
    last = np.max([rank.clock for rank in ranks], axis=0)
    at_root = next((rank.clock for rank in ranks if rank.number == root), None)
    for rank in ranks:
        moment = last
        if root >= 0 and phase == INDEX["bcast"]:
            moment = rank.clock if at_root is None else np.maximum(rank.clock, at_root)
        elif root >= 0 and phase == INDEX["reduce"]:
            moment = last if rank.number == root else rank.clock
        rank.leave(moment)
