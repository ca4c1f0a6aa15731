"""How long each exchange waited for another rank before its data could move.

The calls of one collective are found by their step, phase, root and order: the second "reduce" to root 3 in step 17 is
the same call on every rank that made one. A rank that skips a phase is in no call of it.

The rules are Scalasca's wait states. Without a root (allreduce, reduce_scatter, allgather) all wait for the last to
enter. In a bcast all but the root wait for the root. In a reduce the root waits for the last of the others; the others
send and leave, so what they spend is transfer. wait_states.py says which of these it was and who was waited for.
"""

from dataclasses import dataclass

import numpy as np

from traces.read.runs import Run
from traces.record.phases import EXCHANGE, INDEX, NAMES

_LONG_AGO = np.iinfo(np.int64).min // 2


@dataclass(frozen=True)
class Calls:
    """All ranks' records of some phases, C of them, rank after rank.

    records: (C,) RECORD; place: (C,) the index in run.ranks of the rank that made the call, rank: its number;
    index: (C,) the record's index among its rank's; collective: (C,) equal where ranks met in one call
    """

    records: np.ndarray
    place: np.ndarray
    rank: np.ndarray
    index: np.ndarray
    collective: np.ndarray

    @property
    def has_root(self) -> np.ndarray:
        return self.records["root"] >= 0

    @property
    def is_root(self) -> np.ndarray:
        return self.records["root"] == self.rank

    @property
    def is_waited_for(self) -> np.ndarray:
        """(C,) bool: others of the collective may have to wait for this one."""
        return ~self.has_root | (self.is_root == (self.records["phase"] == INDEX["bcast"]))

    @property
    def may_wait(self) -> np.ndarray:
        """(C,) bool: this one may have to wait for others."""
        return ~self.has_root | (self.is_root != (self.records["phase"] == INDEX["bcast"]))


def collect_calls(run: Run, phases: tuple[str, ...]) -> Calls:
    """The calls of these phases, matched across ranks."""
    chosen_phase = np.isin(np.arange(len(NAMES)), [INDEX[name] for name in phases])
    index = [np.flatnonzero(chosen_phase[trace.records["phase"]]) for trace in run.ranks]
    counts = [len(one) for one in index]
    records = np.concatenate([trace.records[one] for trace, one in zip(run.ranks, index, strict=True)])
    place = np.repeat(np.arange(len(index)), counts)
    rank = np.array([trace.identity["rank"] for trace in run.ranks])[place]
    return Calls(records, place, rank, np.concatenate(index), _match(records, np.cumsum(counts)[:-1]))


def find_waits(run: Run) -> list[np.ndarray]:
    """Nanoseconds each record spent waiting: per rank an int64 array as long as its records, 0 outside exchanges."""
    calls = collect_calls(run, EXCHANGE)
    waits = until_ns(calls, last_entry(calls))
    result = [np.zeros(len(trace.records), np.int64) for trace in run.ranks]
    for place, all_waits in enumerate(result):
        own = calls.place == place
        all_waits[calls.index[own]] = waits[own]
    return result


def last_entry(calls: Calls) -> np.ndarray:
    """(C,) when the last rank that others of the collective wait for had entered, ns."""
    latest = np.full(calls.collective.max(initial=-1) + 1, _LONG_AGO)
    waited_for = calls.is_waited_for
    np.maximum.at(latest, calls.collective[waited_for], calls.records["start"][waited_for])
    return latest[calls.collective]


def until_ns(calls: Calls, moment: np.ndarray) -> np.ndarray:
    """(C,) nanoseconds from each call's entry until `moment`, at most its duration, 0 for those who need not wait."""
    wait = np.clip(moment - calls.records["start"], 0, calls.records["end"] - calls.records["start"])
    return np.where(calls.may_wait, wait, 0)


def _match(calls: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The number of the collective that each call belongs to: int64, equal on the ranks that met in it."""
    roots = int(calls["root"].max(initial=0)) + 2
    kind = (calls["step"].astype(np.int64) * len(NAMES) + calls["phase"]) * roots + calls["root"] + 1
    order = np.concatenate([_occurrence(part) for part in np.split(kind, bounds)])
    return np.unique(kind * (order.max(initial=0) + 1) + order, return_inverse=True)[1]


def _occurrence(kind: np.ndarray) -> np.ndarray:
    """For each entry, how many equal ones came before it: [7, 9, 7, 7] gives [0, 0, 1, 2]."""
    by_kind = np.argsort(kind, kind="stable")
    position = np.arange(len(kind))
    is_first = np.diff(kind[by_kind], prepend=-1) != 0
    count = np.empty(len(kind), np.int64)
    count[by_kind] = position - np.maximum.accumulate(np.where(is_first, position, 0))
    return count
