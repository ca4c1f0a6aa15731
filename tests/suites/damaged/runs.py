"""The files of run folders, to be damaged: refused with one clear line, or read as what they say.

What is right, where a folder is read at all:
  a rank's trace       what a reference reader finds, moved by its clock; each span after the one before, as a tracer
                       writes them, and seated where config.json says
  configuration, log   the JSON that stands there; what a crash may leave out is left out and said
  a rank's calls       as its trace, or left out and said
  counters, clocks     the numbers that stand there, or left out and said; clocks that contradict all traces are refused
and all that is made of a run (table, verdict, exports, prediction) has finite numbers and passes the exports' checkers.
A time or a rate has no checksum: another value is another value.
"""

import json
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gpt2.errors import UserError
from scripts.plot import report
from scripts.prediction.replayed_run import advise_from_run
from scripts.prediction.run_prediction import own_schedule
from scripts.reports.verdict import as_text, diagnose
from scripts.training.lock_file import LOCK, Lock, look, own_lock
from tests.support import chrome_check, faulty_runs, paraver_check
from tests.support.mutations import Damaged, Mutator
from traces import RunError, read_run
from traces.export import chrome, paraver
from traces.record.files import END_CLOCKS, END_LINKS, trace_path, write_at_end
from traces.record.phases import INDEX, NAMES, STEP
from traces.verdict.diagnosis import find_bottleneck
from traces.verdict.summary import measure_runs


def measured_run(folder: Path) -> Path:
    """Three ranks on two nodes, with links, counters and the clocks of the end; as train.py writes it."""
    run = faulty_runs.make(folder / "run", strategy="reduce-bcast", nodes=[0, 1, 1], steps=4, vector=1e6)
    settings = {"wire": "float32", "overlap": False, "model": None, "n_layer": 2, "grad_accum": 1, "grad_clip": 1.0}
    config = run.config | {"settings": run.config["settings"] | settings, "started": "2026-11-21T09:14:59+0000"}
    config |= {"command": ["train.py", "--steps", "4"], "versions": {"python": "3.11.7"}, "threads_per_rank": 1}
    config |= {"code": {"commit": "97fa320d421fe4e36dad8699176d774d6d9abef6", "dirty": False}}
    config |= {"peak": {"tflops": [0.25, None, 0.25], "source": "measured"}}
    (run.path / "config.json").write_text(json.dumps(config, indent=1))
    clocks = [{"node": n, "offset_ns": 50 * n, "error_ns": 9, "at_ns": 10**9} for n in (0, 1)]
    write_at_end(run.path / "traces", END_CLOCKS, clocks)
    write_at_end(run.path / "traces", END_LINKS, config["links"])
    for rank in range(3):
        path = trace_path(run.path / "traces", rank)
        line, _, records = path.read_bytes().partition(b"\n")
        header = json.loads(line)
        header["clock"]["at_ns"] = 1
        path.write_bytes(json.dumps(header).encode() + b"\n" + records)
    return run.path


def read_both_ways(folder: Path):
    """A run, or what scripts/diagnose.py reads of it where a part of it is refused: then it must say what it lacks."""
    try:
        run = read_run(folder)
    except RunError:
        run = read_run(folder, allow_missing=True)
        assert run.missing
    return run


def check_run(run) -> None:
    """A rank's spans as no tracer could write them otherwise, on rank 0's clock; one run's files; a log in order."""
    places = run.config.get("ranks") or [trace.identity for trace in run.ranks]
    for trace in run.ranks:
        records, is_step = trace.records, trace.records["phase"] == INDEX[STEP]
        assert (records["start"] <= records["end"]).all()
        assert np.isin(records["phase"], range(len(NAMES))).all()
        for spans in (records[is_step], records[~is_step]):
            assert (spans["start"][1:] >= spans["end"][:-1]).all()
        for step in records[is_step]:
            apart = (records["end"] <= step["start"]) | (records["start"] >= step["end"])
            assert (apart | ((records["start"] >= step["start"]) & (records["end"] <= step["end"]))).all()
        (place,) = (place for place in places if place["rank"] == trace.identity["rank"])
        assert (place["node"], place["host"]) == (trace.identity["node"], trace.identity["host"])
        assert trace.identity.get("strategy", run.strategy) == run.strategy
    assert all((np.diff(one.records["time"]) >= 0).all() for one in run.counters)
    assert [row["step"] for row in run.log] == sorted({row["step"] for row in run.log})


def names_one_thing_twice(text: bytes) -> bool:
    """Whether an object of a JSON text has a name twice: then nobody can say what it means."""
    found = []
    json.loads(text, object_pairs_hook=lambda pairs: found.append(len(dict(pairs)) < len(pairs)) or dict(pairs))
    return any(found)


class Following:
    """What is made of runs: table, verdict, prediction, exports. Numbers must be finite, and files pass the checkers.

    Many mutants give the same run, without the damaged file: it is looked at once.
    """

    def __init__(self, folder: Path, out: Path):
        self.folder, self.out, self.seen = folder, out, set()

    def read(self):
        run = read_both_ways(self.folder)
        parts = [run.config, run.log, *(one.records.tobytes() for one in (*run.ranks, *run.counters))]
        if (content := repr(parts)) not in self.seen:
            self.seen.add(content)
            check_run(run)
            with warnings.catch_warnings(), np.errstate(divide="raise", over="raise", invalid="raise"):
                warnings.simplefilter("error")
                self.use(run)
        return run

    def use(self, run) -> None:
        (measured,) = measure_runs([run], own_schedule)
        json.dumps(measured.figures, allow_nan=False)
        report([measured])
        self.diagnose(run, measured)
        if len(self.seen) % 2 == 1:
            prv, *_ = paraver.export(run, self.out / "out.prv")
            (path,) = chrome.export(run, self.out / "out.json")
        if len(self.seen) % 4 == 1:  # they take longer than all that they check
            paraver_check.check(prv, same_calls=False)
            chrome_check.check(path)

    def diagnose(self, run, measured) -> None:
        json.dumps(find_bottleneck(run, measured.times).answer([]), allow_nan=False)


class FollowingConfig(Following):
    """What other strategies would take follows from the configuration alone."""

    def diagnose(self, run, measured) -> None:
        if len(self.seen) % 2 == 1:
            answer = diagnose(run)
            json.dumps(answer, allow_nan=False)
            as_text(answer)
        if len(self.seen) % 4 == 1 and run.config.get("ranks"):
            json.dumps(advise_from_run(run.path, None, None, None, None), allow_nan=False)


class FollowingLog(Following):
    """No export has anything from the log."""

    def use(self, run) -> None:
        (measured,) = measure_runs([run], own_schedule)
        json.dumps(measured.figures, allow_nan=False)
        report([measured])
        if len(self.seen) % 4 == 1:
            self.diagnose(run, measured)


def of_json(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_json(content)


def of_lines(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_lines(content)


def case(run: Path, path: Path, mutate, following: Following, judge, least: int) -> Damaged:
    """named: the folder, as a file may be at odds with another."""

    def content(value):
        parts = [one.records.tobytes() for one in (*value.ranks, *value.counters)]
        return repr([value.config, value.log, parts])

    return Damaged(
        path, mutate, following.read, RunError, judge, run, content, lacks=lambda value: bool(value.missing),
        least=least,
    )  # fmt: skip


def config(folder: Path) -> Damaged:
    run = measured_run(folder)
    path = run / "config.json"

    def judge(mutant, value):
        if value and not value.missing:
            assert value.config == json.loads(mutant)
            assert not names_one_thing_twice(mutant)
        elif value:
            assert value.config == {"settings": {"strategy": "reduce-bcast"}}
            assert str(path) in value.missing[0]

    return case(run, path, of_json, FollowingConfig(run, folder), judge, least=5)


def log(folder: Path) -> Damaged:
    run = measured_run(folder)

    def judge(mutant, value):
        rows, lines = {}, set()
        for line in mutant.split(b"\n")[:-1]:
            try:
                row = json.loads(line)
                rows[row["step"]] = row
                lines.add(str(row))
            except (ValueError, KeyError, TypeError, RecursionError):
                assert "log.jsonl, line" in str(value.missing)
        assert {str(row) for row in value.log} <= lines
        if not value.missing:
            assert str(value.log) == str([rows[step] for step in sorted(rows)])

    return case(run, run / "log.jsonl", of_lines, FollowingLog(run, folder), judge, least=10)


def lock(folder: Path) -> Damaged:
    """What a second start of the run finds: whose lock it is, or that nobody can tell."""
    path = folder / LOCK
    path.write_bytes(own_lock("3f" * 16).content())

    def judge(mutant, value):
        if value is not None:
            stands_there = asdict(Lock()) | json.loads(mutant)
            assert all(stands_there[name] == field for name, field in json.loads(value.content()).items())

    def read():
        lock = look(path)
        if not lock.run:
            raise UserError(f"{path}: damaged")
        return lock

    return Damaged(path, Mutator.of_json, read, UserError, judge, least=1)
