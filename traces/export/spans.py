"""A run as other tools' viewers take it: for each rank spans that never overlap, in nanoseconds from the run's start.

Reading a trace has made sure that phases neither overlap each other nor the edge of a step (checks.py).
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
    """One rank. `phases`: array of SPAN, rising and disjoint, none across a step's edge; `steps`: so the envelopes.

    waited: nanoseconds of the span spent waiting for another rank, at its beginning.
    """

    place: dict
    phases: np.ndarray
    steps: np.ndarray


@dataclass(frozen=True)
class Spans:
    """All ranks of the job in order, also those without a trace; `end`: the run's last moment, ns from its start.

    rates: per node number an array of COUNTERS, whose fields are rates here: bytes/s (stalled: ticks/s) from `time` on
    until the next one's. counts: the same counters as they were read, from 0 on.
    """

    ranks: list[RankSpans]
    rates: dict[int, np.ndarray]
    counts: dict[int, np.ndarray]
    end: int


def lay_out(run: Run) -> Spans:
    """The spans of a run. If it crashed, the envelope of its last step ends with the last phase that was written."""
    found = {
        trace.identity["rank"]: _spans_of(trace.records, waits)
        for trace, waits in zip(run.ranks, find_waits(run), strict=True)
    }
    written = [times for pair in found.values() for times in pair if len(times)]
    if not written:
        raise RunError(f"{run.path / 'traces'}: no phase is in it; check that --trace FROM:TO lies inside --steps")
    begin = min(times["start"][0] for times in written)
    for times in written:
        times["start"] -= begin
        times["end"] -= begin
    end = int(max(times["end"][-1] for times in written))
    nothing = np.empty(0, SPAN)
    ranks = [RankSpans(place, *found.get(place["rank"], (nothing, nothing))) for place in _places(run)]
    rates, counts = (
        {one.node: counted(one.records, begin, end) for one in run.counters} for counted in (_rates, _counts)
    )
    return Spans(ranks, rates, counts, end)


@dataclass(frozen=True)
class Communicators:
    """The groups in which ranks meet, counted from 1: the first is WORLD, the only one where each rank has a model.

    members: of each the numbers of its ranks. of: by rank that has a trace, (phases,) its group in each phase.
    """

    members: list[list[int]]
    of: dict[int, np.ndarray]


def communicators(run: Run) -> Communicators:
    """Parts of a stage, copies of a piece, stages, the ranks of a copy: each group once, whatever meets in it."""
    numbers, ranks = groups(run), np.array(run.rank_numbers)
    members, of = [list(range(run.ranks[0].identity["ranks"]))], np.full(numbers.shape, WORLD)
    for phase, row in enumerate(numbers):
        for group in np.unique(row) if row.any() else ():  # of phases in which all meet, or nobody, all are 0
            found = ranks[row == group].tolist()
            if found not in members:
                members.append(found)
            of[phase, row == group] = members.index(found) + WORLD
    return Communicators(members, dict(zip(ranks.tolist(), of.T, strict=True)))


def _places(run: Run) -> list[dict]:
    """Every rank's place: from config.json, or where that is lost, from the traces if all are there.

    title: what the rank is called; lane: where it stands among the ranks, counted from 0.
    """
    places = run.config.get("ranks") or [trace.identity for trace in run.ranks]
    if [place["rank"] for place in places] != list(range(run.ranks[0].identity["ranks"])):
        raise RunError(f"{run.path}: neither config.json nor the traces say where all ranks sat; restore config.json")
    titles = {place["rank"]: {"title": f"rank {place['rank']}", "lane": place["rank"]} for place in places}
    for lane, index in enumerate([] if run.mesh is None else run.mesh.order.tolist()):
        rank = run.rank_numbers[index]
        titles[rank] = {"title": f"{run.mesh.name(index)} (rank {rank})", "lane": lane}
    return [place | titles[place["rank"]] for place in places]


def _spans_of(records: np.ndarray, waits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One rank's phases and steps: arrays of SPAN on rank 0's clock."""
    spans = np.empty(len(records), SPAN)
    for name in RECORD.names:
        spans[name] = records[name]
    spans["waited"] = waits
    spans = spans[spans["end"] > spans["start"]]
    is_step = spans["phase"] == INDEX[STEP]
    phases = spans[~is_step]
    return phases, _with_the_last(spans[is_step], phases)


def _with_the_last(steps: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """The envelopes, with one for a last step that a crash has left without."""
    last = phases[phases["step"] == phases["step"].max(initial=0)]
    if not len(last) or last["step"][0] == 0 or last["step"][0] in steps["step"]:
        return steps
    envelope = last[:1].copy()
    envelope["phase"], envelope["end"] = INDEX[STEP], last["end"].max()
    return np.concatenate([steps, envelope])


def _rates(samples: np.ndarray, begin: int, end: int) -> np.ndarray:
    """RATE between a node's counter samples; the last one is 0. A counter that was set back counts as 0."""
    samples = _last_of_equals(samples)
    rates = np.zeros(len(samples), COUNTERS)
    rates["time"] = np.clip(samples["time"] - begin, 0, end - begin)
    for name in COUNTERS.names[1:]:
        grown = np.maximum(0, np.diff(samples[name]))
        rates[name][:-1] = np.rint(grown / np.diff(samples["time"]) * 1e9)
    return _last_of_equals(rates)


def _counts(samples: np.ndarray, begin: int, end: int) -> np.ndarray:
    """What a node's counters have grown by since their first sample. A counter that was set back has not grown."""
    counts = samples.copy()
    counts["time"] = np.clip(samples["time"] - begin, 0, end - begin)
    for name in COUNTERS.names[1:]:
        counts[name] = np.cumsum(np.maximum(0, np.diff(samples[name], prepend=samples[name][:1])))
    return _last_of_equals(counts)


def _last_of_equals(samples: np.ndarray) -> np.ndarray:
    return samples[np.append(np.diff(samples["time"]) > 0, True)] if len(samples) else samples
