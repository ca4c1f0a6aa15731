"""How long ranks waited for others in exchanges before data could move: for which rank, and in which wait state.

The calls of one collective have the same group, step, phase, root and order: the second "reduce" to root 3 in step 17
is the same collective on every rank that took part. A rank that skips a phase is in none of its collectives. Ranks that
share a model exchange gradients with those that hold the same model shard, and other phases have other groups
(`groups`). A message between pipeline stages is matched like a broadcast of its sender to its receiver: the third
receive from rank 1 in step 17 belongs to rank 1's third send to that rank, and waits until the send begins.

The wait states have Scalasca's names:

    late_broadcast   in a bcast, all but the root wait until the root enters
    early_reduce     the root of a reduce waits until the first other rank enters: the root was early
    late_sender      the root then waits until the last rank enters, which is late. Waits for messages also count here
    wait_at_nxn      in other collectives (allreduce, allgather, ..., sums of "wait"), all wait for the last to enter

The other ranks of a reduce send and leave: all their time is transfer. A rank waits for the last of the ranks that it
needs (early_reduce: for the first, whose data would let the root begin).
"""

from dataclasses import dataclass

import numpy as np

from traces.read.runs import Run
from traces.record.phases import BETWEEN_TWO, EXCHANGE, INDEX, NAMES, PIPELINE

STATES = ("late_broadcast", "early_reduce", "late_sender", "wait_at_nxn")
# The phases in which groups of ranks meet.
SYNCHRONIZING = (*(name for name in EXCHANGE if name not in BETWEEN_TWO), "wait")
# In these phases, ranks with equal places on these axes form a group; in others of EXCHANGE, on "part" and "stage".
ALIKE = {"tensor": ("copy", "stage"), "lend": ("copy", "stage"), "norm": ("copy",), "wait": ()}
ALIKE |= dict.fromkeys(BETWEEN_TWO, ("copy", "part"))
_MEETS = np.isin(np.arange(len(NAMES)), [INDEX[name] for name in (*SYNCHRONIZING, *PIPELINE)])
_SEND, _RECV = (INDEX[name] for name in PIPELINE)


@dataclass(frozen=True)
class Calls:
    """All ranks' calls in which they meet others, C of them, rank after rank.

    records: (C,) RECORD. place: (C,) index of the rank in run.ranks. index: (C,) the record's index in its trace.
    phase, root, group: (C,) int64, equal in the calls of one collective. For a message: "recv", its sender, its
    receiver. is_awaited: (C,) bool, others wait until this call begins. waits: (C,) bool, this call waits for those.
    """

    records: np.ndarray
    place: np.ndarray
    index: np.ndarray
    phase: np.ndarray
    root: np.ndarray
    group: np.ndarray
    is_awaited: np.ndarray
    waits: np.ndarray

    def collectives(self) -> np.ndarray:
        """Return (C,) int64: the number of each call's collective."""
        kind = self.records["step"].astype(np.int64) * len(NAMES) + self.phase
        kind = kind * (int(self.root.max(initial=0)) + 2) + self.root + 1
        kind = kind * (int(self.group.max(initial=0)) + 2) + self.group + 1
        bounds = np.flatnonzero(np.diff(self.place)) + 1
        order = np.concatenate([count_before(part) for part in np.split(kind, bounds)])
        return np.unique(kind * (order.max(initial=0) + 1) + order, return_inverse=True)[1]

    def awaited_in(self, collective: np.ndarray, last: bool) -> np.ndarray:
        """Find the last, or first, call that is awaited in each call's collective: (C,) indices of calls.

        A call whose collective has no such call is given its own index.
        """
        order = np.argsort(self.records["start"] if last else -self.records["start"], kind="stable")
        order = order[self.is_awaited[order]]
        found = np.full(collective.max(initial=-1) + 1, -1)
        found[collective[order]] = order  # the last assignment to an index wins
        return np.where(found[collective] < 0, np.arange(len(collective)), found[collective])

    def until_ns(self, others: np.ndarray) -> np.ndarray:
        """Return (C,) ns that each call waits until the other enters, at most its duration; 0 if it need not wait."""
        start = self.records["start"]
        end = self.records["end"]
        return np.where(self.waits, np.clip(start[others] - start, 0, end - start), 0)


def collect_calls(run: Run) -> Calls:
    """Collect the calls of all ranks."""
    index = [np.flatnonzero(_MEETS[trace.records["phase"]]) for trace in run.ranks]
    place = np.repeat(np.arange(len(index)), [len(one) for one in index])
    records = np.concatenate([trace.records[one] for trace, one in zip(run.ranks, index, strict=True)])
    rank = np.array(run.rank_numbers)[place]
    group = groups(run)[records["phase"], place]
    is_send = records["phase"] == _SEND
    receiver = np.where(is_send, records["root"], rank)
    phase = np.where(is_send, _RECV, records["phase"]).astype(np.int64)
    root = np.where(is_send, rank, records["root"]).astype(np.int64)
    group = np.where(phase == _RECV, receiver, group)
    # Others wait for the root of a bcast, and for all but the root of a reduce.
    is_from_root = np.isin(phase, (INDEX["bcast"], _RECV))
    is_awaited = (root < 0) | ((root == rank) == is_from_root)
    waits = (root < 0) | ((root == rank) != is_from_root)
    return Calls(records, place, np.concatenate(index), phase, root, group, is_awaited, waits)


def groups(run: Run) -> np.ndarray:
    """Return (phases, R) int64: the number of each rank's group in each phase. Ranks meet within a group."""
    found = np.zeros((len(NAMES), len(run.ranks)), np.int64)
    for name in (*EXCHANGE, *PIPELINE, "wait"):
        places = run.places_in(*ALIKE.get(name, ("part", "stage")))
        found[INDEX[name]] = [sorted(set(places)).index(place) for place in places]
    return found


def count_before(kind: np.ndarray) -> np.ndarray:
    """Count the equal entries before each entry: [7, 9, 7, 7] gives [0, 0, 1, 2]."""
    by_kind = np.argsort(kind, kind="stable")
    position = np.arange(len(kind))
    is_first = np.diff(kind[by_kind], prepend=-1) != 0
    count = np.empty(len(kind), np.int64)
    count[by_kind] = position - np.maximum.accumulate(np.where(is_first, position, 0))
    return count


@dataclass(frozen=True)
class WaitStates:
    """All waits longer than 0 ns, W of them.

    step: (W,) step number. place, cause: (W,) index in run.ranks of the rank that waited, and of the one it waited for.
    index: (W,) of the record with the wait, in the rank's trace. state: (W,) index into STATES. nanoseconds: (W,).
    """

    step: np.ndarray
    place: np.ndarray
    cause: np.ndarray
    index: np.ndarray
    state: np.ndarray
    nanoseconds: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        return self.nanoseconds * 1e-9

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
    calls = collect_calls(run)
    collective = calls.collectives()
    last = calls.awaited_in(collective, last=True)
    first = calls.awaited_in(collective, last=False)
    waits = calls.until_ns(last)
    has_root = calls.root >= 0
    is_reduce = has_root & (calls.phase == INDEX["reduce"])
    early = np.where(is_reduce, np.minimum(waits, calls.until_ns(first)), 0)
    late_state = np.full(len(waits), STATES.index("wait_at_nxn"))
    late_state[has_root & (calls.phase == INDEX["bcast"])] = STATES.index("late_broadcast")
    late_state[is_reduce | (calls.phase == _RECV)] = STATES.index("late_sender")
    early_state = np.full(len(waits), STATES.index("early_reduce"))
    # Each call appears twice: its wait for the last rank, and its wait for the first.
    nanoseconds = np.concatenate([waits - early, early])
    kept = np.flatnonzero(nanoseconds)
    call = np.tile(np.arange(len(waits)), 2)[kept]
    return WaitStates(
        step=calls.records["step"][call],
        place=calls.place[call],
        cause=calls.place[np.concatenate([last, first])[kept]],
        index=calls.index[call],
        state=np.concatenate([late_state, early_state])[kept],
        nanoseconds=nanoseconds[kept],
    )


def find_waits(run: Run) -> list[np.ndarray]:
    """Return the ns that each record waited: per rank an int64 array as long as its records, 0 outside exchanges."""
    states = find_wait_states(run)
    result = []
    for place, trace in enumerate(run.ranks):
        own = states.place == place
        waits = np.zeros(len(trace.records), np.int64)
        np.add.at(waits, states.index[own], states.nanoseconds[own])
        waits[trace.records["phase"] == INDEX["wait"]] = 0
        result.append(waits)
    return result
