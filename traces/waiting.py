"""How long each exchange waited for another rank before its data could move.

The calls of one collective are found by their step, phase, root and order: the second "reduce" to root 3 in step 17 is
the same call on every rank that made one. A rank that skips a phase is in no call of it.

The rules are Scalasca's wait states. Without a root (allreduce, reduce_scatter, allgather) all wait for the last to
enter. In a bcast all but the root wait for the root. In a reduce the root waits for the last of the others; the others
send and leave, so what they spend is transfer.
"""

import numpy as np

from traces.phases import EXCHANGE, INDEX, NAMES
from traces.runs import Run

_LONG_AGO = np.iinfo(np.int64).min // 2


def find_waits(run: Run) -> list[np.ndarray]:
    """Nanoseconds each record spent waiting: per rank an int64 array as long as its records, 0 outside exchanges."""
    exchange = np.isin(np.arange(len(NAMES)), [INDEX[name] for name in EXCHANGE])
    chosen = [np.flatnonzero(exchange[trace.records["phase"]]) for trace in run.ranks]
    calls = np.concatenate([trace.records[index] for trace, index in zip(run.ranks, chosen, strict=True)])
    bounds = np.cumsum([len(index) for index in chosen])[:-1]
    rank = np.repeat([trace.identity["rank"] for trace in run.ranks], [len(index) for index in chosen])
    waits = np.split(_wait_of(calls, rank, _match(calls, bounds)), bounds)
    result = [np.zeros(len(trace.records), np.int64) for trace in run.ranks]
    for all_waits, index, exchange_waits in zip(result, chosen, waits, strict=True):
        all_waits[index] = exchange_waits
    return result


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


def _wait_of(calls: np.ndarray, rank: np.ndarray, collective: np.ndarray) -> np.ndarray:
    """Nanoseconds of each call until the last rank it depends on had entered, at most the call's duration."""
    is_root = calls["root"] == rank
    has_root = calls["root"] >= 0
    is_bcast = calls["phase"] == INDEX["bcast"]
    waited_for = ~has_root | (is_root == is_bcast)
    may_wait = ~has_root | is_bcast | is_root
    latest = np.full(collective.max(initial=-1) + 1, _LONG_AGO)
    np.maximum.at(latest, collective[waited_for], calls["start"][waited_for])
    wait = np.clip(latest[collective] - calls["start"], 0, calls["end"] - calls["start"])
    return np.where(may_wait, wait, 0)
