"""How long ranks waited for others in exchanges before data could move: for which rank, and in which wait state.

The calls of one collective have the same group, step, phase, root and order: the second "reduce" to root 3 in step 17
is the same collective on every rank that took part. A rank that skips a phase is in none of its collectives. Ranks that
share a model exchange gradients with those that hold the same model shard, and other phases have other groups
(`groups`). The third receive from rank 1 in step 17 belongs to rank 1's third send to the receiver, and waits until
that send begins. This is a late_sender, too.

The wait states are Scalasca's:

    late_broadcast   in a bcast, all but the root wait until the root enters
    early_reduce     the root of a reduce waits until the first other rank enters: the root was early
    late_sender      then the root waits until the last rank enters: that rank is late
    wait_at_nxn      where all wait for all (allreduce, reduce_scatter, allgather, the sums of "wait"), until the last

The other ranks of a reduce send and leave: all their time is transfer. Of the ranks that it needs, a rank waits for the
last to enter (early_reduce: the first, with whose data the root could have begun).
"""

from dataclasses import dataclass

import numpy as np

from traces.read.runs import Run
from traces.record.phases import BETWEEN_TWO, EXCHANGE, INDEX, NAMES, PIPELINE

STATES = ("late_broadcast", "early_reduce", "late_sender", "wait_at_nxn")
COLLECTIVE = tuple(name for name in EXCHANGE if name not in BETWEEN_TWO)
# The phases in which ranks meet.
SYNCHRONIZING = (*COLLECTIVE, "wait")
# Ranks that are equal on these axes are a phase's group; in all other phases of EXCHANGE, on "part" and "stage".
ALIKE = {"tensor": ("copy", "stage"), "lend": ("copy", "stage"), "norm": ("copy",), "wait": ()}
ALIKE |= dict.fromkeys(BETWEEN_TWO, ("copy", "part"))


@dataclass(frozen=True)
class MatchedCalls:
    """All ranks' records of some phases, C of them, rank after rank.

    records: (C,) RECORD. place: (C,) index of the rank in run.ranks. rank: (C,) its number. index: (C,) the record's
    index among its rank's. collective: (C,) equal for the calls of one collective.
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
    def is_bcast(self) -> np.ndarray:
        return self.records["phase"] == INDEX["bcast"]

    def waited_for(self, last: bool) -> np.ndarray:
        """Find the last, or first, call that others wait for in each call's collective: (C,) indices of calls.

        A call whose collective has no such call is given its own index.
        """
        order = np.argsort(self.records["start"] if last else -self.records["start"], kind="stable")
        # Others wait for the root of a bcast, and for all but the root of a reduce.
        is_waited_for = ~self.has_root | (self.is_root == self.is_bcast)
        order = order[is_waited_for[order]]
        found = np.full(self.collective.max(initial=-1) + 1, -1)
        found[self.collective[order]] = order  # the last assignment to an index stays
        return np.where(found[self.collective] < 0, np.arange(len(self.records)), found[self.collective])

    def until_ns(self, others: np.ndarray) -> np.ndarray:
        """Return (C,) ns that each call waits until the other enters, at most its duration; 0 if it need not wait."""
        start = self.records["start"]
        end = self.records["end"]
        may_wait = ~self.has_root | (self.is_root != self.is_bcast)
        return np.where(may_wait, np.clip(start[others] - start, 0, end - start), 0)


def collect_calls(run: Run, phases: tuple[str, ...]) -> MatchedCalls:
    """Collect the calls of these phases, matched across ranks."""
    chosen_phase = np.isin(np.arange(len(NAMES)), [INDEX[name] for name in phases])
    index = [np.flatnonzero(chosen_phase[trace.records["phase"]]) for trace in run.ranks]
    counts = [len(one) for one in index]
    records = np.concatenate([trace.records[one] for trace, one in zip(run.ranks, index, strict=True)])
    place = np.repeat(np.arange(len(index)), counts)
    rank = np.array(run.rank_numbers)[place]
    group = groups(run)[records["phase"], place]
    return MatchedCalls(records, place, rank, np.concatenate(index), _match(records, group, np.cumsum(counts)[:-1]))


def groups(run: Run) -> np.ndarray:
    """Return (phases, R) int64: the number of each rank's group in each phase. Ranks meet within a group."""
    found = np.zeros((len(NAMES), len(run.ranks)), np.int64)
    for name in (*EXCHANGE, *PIPELINE, "wait"):
        places = run.places_in(*ALIKE.get(name, ("part", "stage")))
        found[INDEX[name]] = [sorted(set(places)).index(place) for place in places]
    return found


def _match(calls: np.ndarray, group: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return (C,) int64: the number of each call's collective. bounds: where the calls of the next rank begin."""
    roots = int(calls["root"].max(initial=0)) + 2
    kind = (calls["step"].astype(np.int64) * len(NAMES) + calls["phase"]) * roots + calls["root"] + 1
    kind = kind * (int(group.max(initial=0)) + 1) + group
    order = np.concatenate([_occurrence(part) for part in np.split(kind, bounds)])
    return np.unique(kind * (order.max(initial=0) + 1) + order, return_inverse=True)[1]


def _occurrence(kind: np.ndarray) -> np.ndarray:
    """Count the equal entries before each entry: [7, 9, 7, 7] gives [0, 0, 1, 2]."""
    by_kind = np.argsort(kind, kind="stable")
    position = np.arange(len(kind))
    is_first = np.diff(kind[by_kind], prepend=-1) != 0
    count = np.empty(len(kind), np.int64)
    count[by_kind] = position - np.maximum.accumulate(np.where(is_first, position, 0))
    return count


def find_waits(run: Run) -> list[np.ndarray]:
    """Return the ns that each record waited: per rank an int64 array as long as its records, 0 outside exchanges."""
    calls = collect_calls(run, COLLECTIVE)
    received = find_receives(run)
    result = [np.zeros(len(trace.records), np.int64) for trace in run.ranks]
    for found, waits in ((calls, calls.until_ns(calls.waited_for(last=True))), (received, received.waits_ns)):
        for place, all_waits in enumerate(result):
            own = found.place == place
            all_waits[found.index[own]] = waits[own]
    return result


@dataclass(frozen=True)
class Receives:
    """All ranks' receives from neighbouring stages that were matched with a send, C of them.

    step: (C,). place, sender: (C,) indices in run.ranks. index: (C,) the record's index among its rank's. waits_ns:
    (C,) from each receive's entry until its send began, at most its duration.
    """

    step: np.ndarray
    place: np.ndarray
    sender: np.ndarray
    index: np.ndarray
    waits_ns: np.ndarray


def find_receives(run: Run) -> Receives:
    """Match a rank's n-th receive from a sender in a step with that sender's n-th send to it in the step."""
    calls = collect_calls(run, PIPELINE)
    step = calls.records["step"]
    root = calls.records["root"]
    start = calls.records["start"]
    is_send = calls.records["phase"] == INDEX["send"]
    ends = np.stack([step, np.where(is_send, calls.rank, root), np.where(is_send, root, calls.rank)], axis=1)
    kind = np.unique(ends, axis=0, return_inverse=True)[1].ravel()
    sends = np.flatnonzero(is_send)
    receives = np.flatnonzero(~is_send)
    keys = (kind[some] * (len(kind) + 1) + _occurrence(kind[some]) for some in (receives, sends))
    _, matched_receives, matched_sends = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    receives = receives[matched_receives]
    sends = sends[matched_sends]
    waits_ns = np.clip(start[sends] - start[receives], 0, calls.records["end"][receives] - start[receives])
    return Receives(step[receives], calls.place[receives], calls.place[sends], calls.index[receives], waits_ns)


@dataclass(frozen=True)
class WaitStates:
    """All waits longer than 0 ns, W of them.

    step: (W,) step number. place, cause: (W,) index in run.ranks of the rank that waited, and of the one it waited for.
    state: (W,) index into STATES. seconds: (W,) float64.
    """

    step: np.ndarray
    place: np.ndarray
    cause: np.ndarray
    state: np.ndarray
    seconds: np.ndarray

    def per_step(self, steps: np.ndarray, ranks: int) -> np.ndarray:
        """Return (S, R, len(STATES)) seconds that each rank waited in each of the steps."""
        return self._sum((len(steps), ranks, len(STATES)), steps, self.place, self.state)

    def caused(self, steps: np.ndarray, ranks: int) -> np.ndarray:
        """Return (S, R) seconds that all ranks together waited for each rank in each of the steps."""
        return self._sum((len(steps), ranks), steps, self.cause)

    def _sum(self, shape: tuple[int, ...], steps: np.ndarray, *indices: np.ndarray) -> np.ndarray:
        """Sum the seconds of the waits in `steps` into a table of this shape, indexed by step, then by `indices`."""
        step = np.searchsorted(steps, self.step).clip(max=len(steps) - 1)
        inside = steps[step] == self.step
        result = np.zeros(shape)
        np.add.at(result, tuple(index[inside] for index in (step, *indices)), self.seconds[inside])
        return result


def find_wait_states(run: Run) -> WaitStates:
    calls = collect_calls(run, SYNCHRONIZING)
    last = calls.waited_for(last=True)
    first = calls.waited_for(last=False)
    is_reduce_root = calls.is_root & (calls.records["phase"] == INDEX["reduce"])
    waits = calls.until_ns(last)
    early = np.where(is_reduce_root, np.minimum(waits, calls.until_ns(first)), 0)
    kinds = [calls.has_root & calls.is_bcast, is_reduce_root]
    late_states = [STATES.index("late_broadcast"), STATES.index("late_sender")]
    late_state = np.select(kinds, late_states, STATES.index("wait_at_nxn"))
    early_state = np.full(len(waits), STATES.index("early_reduce"))
    # Each call appears twice: its wait for the last rank, and its wait for the first.
    call = np.tile(np.arange(len(waits)), 2)
    nanoseconds = np.concatenate([waits - early, early])
    state = np.concatenate([late_state, early_state])
    cause = calls.place[np.concatenate([last, first])]
    kept = nanoseconds > 0
    call = call[kept]
    received = find_receives(run)
    late = received.waits_ns > 0
    return WaitStates(
        step=np.concatenate([calls.records["step"][call], received.step[late]]),
        place=np.concatenate([calls.place[call], received.place[late]]),
        cause=np.concatenate([cause[kept], received.sender[late]]),
        state=np.concatenate([state[kept], np.full(late.sum(), STATES.index("late_sender"))]),
        seconds=np.concatenate([nanoseconds[kept], received.waits_ns[late]]) * 1e-9,
    )
