"""A run laid out for other tools: the spans of each rank, which never overlap, in nanoseconds from the run's start.

traces/read/span_checks.py has checked that phases overlap neither each other nor the edge of a step.
"""

from dataclasses import dataclass

import numpy as np

from traces.read.runs import Run
from traces.read.waits import find_waits, groups
from traces.record.files import COUNTERS, RECORD, RunError
from traces.record.phases import INDEX, STEP

SPAN = np.dtype([*RECORD.descr, ("waited", "<i8")])
WORLD = 1  # the communicator of all ranks


@dataclass(frozen=True)
class RankSpans:
    """One rank. phases: array of SPAN, ascending and disjoint, none across a step's edge. steps: likewise, the steps.

    SPAN's `waited`: nanoseconds at the beginning of the span spent waiting for another rank.
    """

    place: dict
    phases: np.ndarray
    steps: np.ndarray


@dataclass(frozen=True)
class Spans:
    """All ranks of the job in order, also those without a trace. end: the run's last moment, ns from its start.

    counted: for each node, two arrays of COUNTERS: the counters, beginning at 0, and their rates in bytes/s (stalled:
    ticks/s), each from its `time` to that of the next entry; the last rate is 0.
    """

    ranks: list[RankSpans]
    counted: dict[int, tuple[np.ndarray, np.ndarray]]
    end: int


def lay_out(run: Run) -> Spans:
    """Lay out a run. If it crashed, the envelope of its last step ends with the last phase that was written."""
    found = {
        trace.identity["rank"]: _spans_of(trace.records, waits)
        for trace, waits in zip(run.ranks, find_waits(run), strict=True)
    }
    written = [times for pair in found.values() for times in pair if len(times)]
    if not written:
        raise RunError(f"{run.path / 'traces'} contains no phase; check that --trace FROM:TO lies inside --steps")
    begin = min(times["start"][0] for times in written)
    for times in written:
        times["start"] -= begin
        times["end"] -= begin
    end = int(max(times["end"][-1] for times in written))
    nothing = np.empty(0, SPAN)
    ranks = [RankSpans(place, *found.get(place["rank"], (nothing, nothing))) for place in _places(run)]
    counted = {one.node: _counted(one.records, begin, end) for one in run.counters}
    return Spans(ranks, counted, end)


@dataclass(frozen=True)
class Communicators:
    """The groups in which ranks meet, counted from 1. The first one is WORLD; there are others if ranks share a model.

    members: the ranks of each group. of: for each rank with a trace, (phases,) its group in each phase.
    """

    members: list[list[int]]
    of: dict[int, np.ndarray]


def communicators(run: Run) -> Communicators:
    """Return the run's groups, without repetitions."""
    numbers = groups(run)
    ranks = np.array(run.rank_numbers)
    members = [list(range(run.ranks[0].identity["ranks"]))]
    of = np.full(numbers.shape, WORLD)
    for phase, row in enumerate(numbers):
        for group in np.unique(row) if row.any() else ():  # all 0: the phase's group is the world, or no ranks meet
            found = ranks[row == group].tolist()
            if found not in members:
                members.append(found)
            of[phase, row == group] = members.index(found) + WORLD
    return Communicators(members, dict(zip(ranks.tolist(), of.T, strict=True)))


def _places(run: Run) -> list[dict]:
    """Return every rank's place: from config.json; from the traces if only config.json is missing.

    title: the rank's name. row: its position among the ranks, counted from 0.
    """
    places = run.config.get("ranks") or [trace.identity for trace in run.ranks]
    if [place["rank"] for place in places] != list(range(run.ranks[0].identity["ranks"])):
        raise RunError(f"{run.path}: neither config.json nor the traces say where all ranks ran; restore config.json")
    titles = {place["rank"]: {"title": f"rank {place['rank']}", "row": place["rank"]} for place in places}
    for row, index in enumerate([] if run.mesh is None else run.mesh.order.tolist()):
        rank = run.rank_numbers[index]
        titles[rank] = {"title": f"{run.mesh.name(index)} (rank {rank})", "row": row}
    return [place | titles[place["rank"]] for place in places]


def _spans_of(records: np.ndarray, waits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one rank's phases and steps: arrays of SPAN on rank 0's clock."""
    spans = np.empty(len(records), SPAN)
    for name in RECORD.names:
        spans[name] = records[name]
    spans["waited"] = waits
    spans = spans[spans["end"] > spans["start"]]
    is_step = spans["phase"] == INDEX[STEP]
    phases = spans[~is_step]
    return phases, _with_the_last(spans[is_step], phases)


def _with_the_last(steps: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """Add an envelope for a last step that a crash left without one."""
    last = phases[phases["step"] == phases["step"].max(initial=0)]
    if not len(last) or last["step"][0] == 0 or last["step"][0] in steps["step"]:
        return steps
    envelope = last[:1].copy()
    envelope["phase"] = INDEX[STEP]
    envelope["end"] = last["end"].max()
    return np.concatenate([steps, envelope])


def _counted(samples: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a node's counters, beginning at 0, and their rates. Where a counter restarts, assume no growth."""
    counts = samples.copy()
    for name in COUNTERS.names[1:]:
        counts[name] = np.cumsum(np.maximum(0, np.diff(samples[name], prepend=samples[name][:1])))
    counts = _last_of_equals(counts)
    rates = np.zeros(len(counts), COUNTERS)
    rates["time"] = counts["time"]
    for name in COUNTERS.names[1:]:
        rates[name][:-1] = np.rint(np.diff(counts[name]) / np.diff(counts["time"]) * 1e9)
    for table in (counts, rates):
        table["time"] = np.clip(table["time"] - begin, 0, end - begin)
    return _last_of_equals(counts), _last_of_equals(rates)


def _last_of_equals(samples: np.ndarray) -> np.ndarray:
    return samples[np.append(np.diff(samples["time"]) > 0, True)] if len(samples) else samples
