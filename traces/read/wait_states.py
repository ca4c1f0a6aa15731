"""Which kind of waiting each rank did in each step, and for whom: Scalasca's wait states from the phases' times.

    late_broadcast   in a bcast, until the root came
    early_reduce     the root of a reduce, until the first of the others came: it was early
    late_sender      the root of a reduce, from then until the last of them came: that one is late
    wait_at_nxn      where all wait for all (allreduce, reduce_scatter, allgather, the sums of "wait"), until the last

Early reduce and late sender together are what waiting.py counts. The rank waited for is the one that came last of
those that had to come (early_reduce: the first of them, whose data the root could have begun with).
"""

from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes
from traces.read.runs import Run
from traces.read.waiting import Calls, collect_calls, last_entry, until_ns
from traces.record.phases import EXCHANGE, INDEX, PHASES, STEP

STATES = ("late_broadcast", "early_reduce", "late_sender", "wait_at_nxn")
SYNCHRONIZING = (*EXCHANGE, "wait")
TOLERANCE = 0.01
_FAR_OFF = np.iinfo(np.int64).max


@dataclass(frozen=True)
class WaitStates:
    """Waits, W of them, none of 0 ns. `place` and `cause` are indices into run.ranks: who waited, and for whom.

    step: (W,) step number; place, cause: (W,) int64; state: (W,) index into STATES; seconds: (W,) float64
    """

    step: np.ndarray
    place: np.ndarray
    cause: np.ndarray
    state: np.ndarray
    seconds: np.ndarray

    def per_step(self, steps: np.ndarray, ranks: int) -> np.ndarray:
        """(S, R, len(STATES)) seconds that each rank waited in each of the steps."""
        index, inside = self._inside(steps)
        result = np.zeros((len(steps), ranks, len(STATES)))
        np.add.at(result, (index[inside], self.place[inside], self.state[inside]), self.seconds[inside])
        return result

    def caused(self, steps: np.ndarray, ranks: int) -> np.ndarray:
        """(S, R) seconds that all ranks together waited for each rank in each of the steps."""
        index, inside = self._inside(steps)
        result = np.zeros((len(steps), ranks))
        np.add.at(result, (index[inside], self.cause[inside]), self.seconds[inside])
        return result

    def for_whom(self, steps: np.ndarray, ranks: int) -> np.ndarray:
        """(R, R) seconds that each rank (first axis) waited for each other in all of the steps."""
        _, inside = self._inside(steps)
        result = np.zeros((ranks, ranks))
        np.add.at(result, (self.place[inside], self.cause[inside]), self.seconds[inside])
        return result

    def _inside(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each wait the index of its step, and whether it is among `steps`."""
        index = np.searchsorted(steps, self.step).clip(max=len(steps) - 1)
        return index, steps[index] == self.step


def find_wait_states(run: Run) -> WaitStates:
    calls = collect_calls(run, SYNCHRONIZING)
    is_reduce_root = calls.is_root & (calls.records["phase"] == INDEX["reduce"])
    is_bcast = calls.has_root & (calls.records["phase"] == INDEX["bcast"])
    waits = until_ns(calls, last_entry(calls))
    early = np.where(is_reduce_root, np.minimum(waits, until_ns(calls, _first_entry(calls))), 0)
    late_state = np.full(len(waits), STATES.index("wait_at_nxn"))
    late_state[is_bcast], late_state[is_reduce_root] = STATES.index("late_broadcast"), STATES.index("late_sender")
    early_state = np.full(len(waits), STATES.index("early_reduce"))
    # Each call twice: what it waited for the last to come, and what for the first.
    call = np.tile(np.arange(len(waits)), 2)
    nanoseconds = np.concatenate([waits - early, early])
    state = np.concatenate([late_state, early_state])
    cause = np.concatenate([_who(calls, last=True), _who(calls, last=False)])
    kept = nanoseconds > 0
    call = call[kept]
    return WaitStates(
        calls.records["step"][call], calls.place[call], cause[kept], state[kept], nanoseconds[kept] * 1e-9
    )


def _first_entry(calls: Calls) -> np.ndarray:
    """(C,) when the first rank that others of the collective wait for had entered, ns."""
    earliest = np.full(calls.collective.max(initial=-1) + 1, _FAR_OFF)
    waited_for = calls.is_waited_for
    np.minimum.at(earliest, calls.collective[waited_for], calls.records["start"][waited_for])
    return earliest[calls.collective]


def _who(calls: Calls, last: bool) -> np.ndarray:
    """(C,) index in run.ranks of the last, or first, to enter of those that others of the collective wait for."""
    order = np.argsort(calls.records["start"] if last else -calls.records["start"], kind="stable")
    order = order[calls.is_waited_for[order]]
    who = np.zeros(calls.collective.max(initial=-1) + 1, np.int64)
    who[calls.collective[order]] = calls.place[order]  # of several assignments the last one stays
    return who[calls.collective]


def check_sums(run: Run, times: StepTimes, tolerance: float = TOLERANCE) -> list[str]:
    """What does not add up, a sentence each; [] where each rank's phases fill its steps and the log says the same.

    Sums over the measured steps are compared: a rank's phases with its steps, rank 0's steps with log.jsonl.
    """
    steps = times.seconds[:, :, INDEX[STEP]].sum(axis=0)
    phases = times.seconds[:, :, [INDEX[name] for name in PHASES]].sum(axis=(0, 2))
    difference = np.abs(steps - phases) / steps
    worst, count = int(np.argmax(difference)), int((difference > tolerance).sum())
    found = []
    if count:
        rank, more = run.ranks[worst].identity["rank"], f", {count - 1} other ranks likewise" if count > 1 else ""
        text = f"rank {rank}: phases sum to {phases[worst]:.3f} s of {steps[worst]:.3f} s in its steps{more}"
        found.append(text)
    return found + _check_log(run, times, tolerance)


def _check_log(run: Run, times: StepTimes, tolerance: float) -> list[str]:
    logged = {row["step"]: row["step_s"] for row in run.log if "step_s" in row}
    both = [index for index, step in enumerate(times.steps.tolist()) if step in logged]
    if not both or run.ranks[0].identity["rank"] != 0:
        return []
    traced_s = times.seconds[both, 0, INDEX[STEP]].sum()
    logged_s = sum(logged[int(times.steps[index])] for index in both)
    if abs(traced_s - logged_s) <= tolerance * logged_s:
        return []
    return [f"log.jsonl: {len(both)} steps took {logged_s:.3f} s, rank 0's trace says {traced_s:.3f} s"]
