"""Damaged files: a thousand mutants of each kind are refused with one clear line, or read as what their bytes say.

What is right, where a file is read at all:
  shards, model files  exactly the numbers that a reference reader of ten lines finds, and refused where it finds none
  a rank's trace       the same, moved by the header's clock; each span after the one before it, as a tracer writes
  configuration, log   the JSON that stands there; what a crash may leave out is left out and said
  counters, clocks     the numbers that stand there, or left out and said
and all that is made of a run (table, verdict, exports, prediction) has finite numbers and passes the exports' checkers.
A time or a weight has no checksum: another value is another value.
"""

import ast
import json
import struct
import sys
import warnings
from pathlib import Path

import chrome_check
import faulty_runs
import numpy as np
import paraver_check
import pytest
from mutations import Mutator, read_mutants

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from advise_from_run import advise_from_run
from diagnose import as_text, diagnose
from plot import report

from gpt2 import checkpoints
from gpt2.checkpoints import Checkpoint
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.llmc import read_config, read_parameters, write_parameters
from gpt2.parameters import Layout, Parameters, initialize
from gpt2.shards import open_shard, write_shard
from gpt2.windows import Windows
from traces import RunError, chrome, paraver, read_run
from traces.analysis import measure_runs
from traces.clocks import write_end_clocks
from traces.counters import COUNTERS, counters_path
from traces.diagnosis import find_bottleneck
from traces.evidence_table import evidence_dict
from traces.files import RECORD, trace_path
from traces.phases import INDEX, NAMES, STEP

ROOT = Path(__file__).parent.parent


# --- token shards ---


def tokens_in(content: bytes) -> list[int] | None:
    """The tokens of a shard by llm.c's own rules; None for what is no shard."""
    if len(content) < 1024:
        return None
    magic, version, count = struct.unpack_from("<3i", content)
    if (magic, version) != (20240520, 1) or count < 1 or len(content) != 1024 + 2 * count:
        return None
    return list(struct.unpack_from(f"<{count}H", content, 1024))


def test_a_shard(tmp_path):
    path, T, read_at_all = tmp_path / "a.bin", 3, 0
    write_shard(path, np.random.default_rng(0).integers(0, 65536, 32))

    def read():
        shard = open_shard(path)
        windows = Windows([shard], T) if len(shard) > T else None
        inputs, targets = np.zeros((2, windows.count if windows else 0, T), np.int32)
        if windows:
            windows.read(0, inputs, targets)
        return shard.tolist(), np.hstack([inputs, targets[:, -1:]]).tolist()

    for mutant, result in read_mutants(path, lambda mutator, content: mutator.of_bytes(content, 16), read, UserError):
        expected = tokens_in(mutant)
        assert (result and result[0]) == expected
        if result:
            assert result[1] == [expected[at : at + T + 1] for at in range(0, len(expected) - T, T)]
            read_at_all += 1
    assert read_at_all > 100


# --- llm.c's model files ---

SMALL = GPT2Config(n_layer=2, n_head=2, n_embd=4, context=3, vocab_size=5)


def model_in(content: bytes) -> tuple | None:
    """(the header's six numbers, wte, all other weights) of a model file; None for what is none."""
    if len(content) < 1024:
        return None
    magic, version, context, vocabulary, layers, heads, channels, padded = struct.unpack_from("<8i", content)
    sizes = (context, vocabulary, layers, heads, channels, padded)
    if (magic, version) != (20240326, 3) or min(sizes) < 1 or channels % heads or padded < vocabulary:
        return None
    rest = context * channels + layers * (12 * channels**2 + 13 * channels) + 2 * channels
    if len(content) != 1024 + 4 * (padded * channels + rest):
        return None
    weights = np.frombuffer(content, "<f4", offset=1024)
    return sizes, weights[: vocabulary * channels], weights[padded * channels :]


def test_a_model_file(tmp_path):
    path, read_at_all = tmp_path / "model.bin", 0
    parameters = Parameters.zeros(Layout(SMALL))
    initialize(parameters, seed=1)
    write_parameters(path, parameters)
    target = Parameters.zeros(Layout(SMALL))

    def read():
        config = read_config(path)
        if config == SMALL:
            target.flat[:] = 77.0
            read_parameters(path, target)
        return config, target.flat.copy()

    for mutant, result in read_mutants(path, lambda mutator, content: mutator.of_bytes(content, 36), read, UserError):
        expected = model_in(mutant)
        assert (result is None) == (expected is None)
        if result is None:
            continue
        config, flat = result
        sizes, wte, rest = expected
        assert (config.context, config.vocab_size, config.n_layer, config.n_head, config.n_embd) == sizes[:5]
        if config == SMALL:
            assert flat[: wte.size].tobytes() == wte.tobytes()
            assert not flat[wte.size : SMALL.padded_vocab_size * SMALL.n_embd].any()
            assert sorted(flat[SMALL.padded_vocab_size * SMALL.n_embd :].view("<u4")) == sorted(rest.view("<u4"))
            read_at_all += 1
    assert read_at_all > 100


# --- checkpoints ---


@pytest.fixture
def checkpoint(tmp_path):
    """(folder, {name: values}): of two ranks, in ranges shorter than usual, so that there are several in a file."""
    layout = Layout(SMALL)
    arrays = {name: np.random.default_rng(7).random(layout.count, np.float32) for name in checkpoints.STATE}
    part, files = tmp_path / "step-00000007.part", {}
    for rank, cut in enumerate((slice(0, 100), slice(100, layout.count))):
        ranges = [(name, cut.start, values[cut]) for name, values in arrays.items()]
        files[checkpoints.rank_file(rank)] = checkpoints.write_part(part, 7, rank, ranges)
    facts = {"step": 7, "next_window": 28} | checkpoints.model_facts(layout)
    return checkpoints.complete(part, facts, files), arrays


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        (checkpoints.rank_file(1), lambda mutator, content: mutator.of_bytes(content, 800)),
        (checkpoints.rank_file(1), lambda mutator, content: mutator.of_sized_header(content)),
        (checkpoints.MARKER, lambda mutator, content: mutator.of_json(content)),
    ],
    ids=["rank's bytes", "rank's header", "marker"],
)
def test_a_checkpoint(checkpoint, name, mutate):
    """Its checksums leave nothing to chance: what is read is what was written."""
    folder, arrays = checkpoint
    facts = Checkpoint(folder).facts

    def read():
        found = Checkpoint(folder)
        found.check(0, 1)
        read = {array: np.empty_like(values) for array, values in arrays.items()}
        for array, out in read.items():
            found.read(array, 0, out)
        return found, read

    for mutant, result in read_mutants(folder / name, mutate, read, UserError, folder):
        if result is not None:
            found, read = result
            assert (found.facts, found.config) == (facts, SMALL)
            assert all(np.array_equal(read[array], values) for array, values in arrays.items())
            assert len(mutant) == (folder / name).stat().st_size or name == checkpoints.MARKER


# --- run folders ---


@pytest.fixture
def folder(tmp_path):
    """Three ranks on two nodes, with links, counters and the clocks of the end; as train.py writes it."""
    run = faulty_runs.make(tmp_path / "run", strategy="reduce-bcast", nodes=[0, 1, 1], steps=4, vector=1e6)
    settings = {"wire": "float32", "overlap": False, "model": None, "n_layer": 2, "grad_accum": 1, "grad_clip": 1.0}
    config = run.config | {"settings": run.config["settings"] | settings, "started": "2026-11-21T09:14:59+0000"}
    config |= {"command": ["train.py", "--steps", "4"], "versions": {"python": "3.11.7"}, "threads_per_rank": 1}
    (run.path / "config.json").write_text(json.dumps(config, indent=1))
    write_end_clocks(
        run.path / "traces", [{"node": n, "offset_ns": 50 * n, "error_ns": 9, "at_ns": 10**9} for n in (0, 1)]
    )
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
        (measured,) = measure_runs([run])
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
        json.dumps(evidence_dict(find_bottleneck(run, measured.times)), allow_nan=False)


class FollowingConfig(Following):
    """What other strategies would take follows from the configuration alone."""

    def diagnose(self, run, measured) -> None:
        answer = diagnose(run)
        json.dumps(answer, allow_nan=False)
        as_text(answer)
        if len(self.seen) % 4 == 1 and run.config.get("ranks"):
            json.dumps(advise_from_run(run.path, None, None, None, None), allow_nan=False)


class FollowingLog(Following):
    """No export has anything from the log."""

    def use(self, run) -> None:
        (measured,) = measure_runs([run])
        json.dumps(measured.figures, allow_nan=False)
        report([measured])
        if len(self.seen) % 4 == 1:
            self.diagnose(run, measured)


def of_json(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_json(content)


def of_lines(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_lines(content)


def of_trace(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_header_and_records(content, RECORD.itemsize)


def of_counters(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_header_and_records(content, COUNTERS.itemsize)


def test_config(folder, tmp_path):
    path = folder / "config.json"
    for mutant, run in read_mutants(path, of_json, FollowingConfig(folder, tmp_path).read, RunError, folder):
        if run and not run.missing:
            assert run.config == json.loads(mutant)
            assert not names_one_thing_twice(mutant)
        elif run:
            assert run.config == {"settings": {"strategy": "reduce-bcast"}}
            assert str(path) in run.missing[0]


def test_log(folder, tmp_path):
    path, read_whole = folder / "log.jsonl", 0
    for mutant, run in read_mutants(path, of_lines, FollowingLog(folder, tmp_path).read, RunError, folder):
        rows, lines = {}, set()
        for line in mutant.split(b"\n")[:-1]:
            try:
                row = json.loads(line)
                rows[row["step"]] = row
                lines.add(str(row))
            except (ValueError, KeyError, TypeError, RecursionError):
                assert "log.jsonl, line" in str(run.missing)
        assert {str(row) for row in run.log} <= lines
        if not run.missing:
            assert str(run.log) == str([rows[step] for step in sorted(rows)])
            read_whole += 1
    assert read_whole > 100


def spans_in(content: bytes, end: dict | None) -> list[tuple]:
    """(step, phase's name, root, start, end, bytes) of a trace file's whole records, on rank 0's clock."""
    line, _, records = content.partition(b"\n")
    header = json.loads(line)
    clock, names = header["clock"], header["phases"]
    end = end or {"at_ns": 0, "offset_ns": 0} | clock
    elapsed = end["at_ns"] - clock.get("at_ns", end["at_ns"])
    drift = (end["offset_ns"] - clock["offset_ns"]) / elapsed if elapsed else 0

    def moved(time):
        return time + clock["offset_ns"] + (round((time - clock["at_ns"]) * drift) if drift else 0)

    whole = records[: len(records) // 36 * 36]
    rows = [struct.unpack("<3i3q", whole[at : at + 36]) for at in range(0, len(whole), 36)]
    return [(step, names[phase], root, moved(a), moved(b), size) for step, phase, root, a, b, size in rows]


def test_a_ranks_trace(folder, tmp_path):
    path, read_at_all = trace_path(folder / "traces", 1), 0
    end = {clock["node"]: clock for clock in json.loads((folder / "traces" / "clocks.json").read_text())}

    for mutant, run in read_mutants(path, of_trace, Following(folder, tmp_path).read, RunError, folder):
        if run is None or run.missing:
            continue
        records = [(step, NAMES[phase], *rest) for step, phase, *rest in run.ranks[1].records.tolist()]
        assert records == spans_in(mutant, end[run.ranks[1].identity["node"]])
        read_at_all += 1
    assert read_at_all > 100


def test_a_nodes_counters(folder, tmp_path):
    path, read_at_all = counters_path(folder / "traces", 1), 0

    for mutant, run in read_mutants(path, of_counters, Following(folder, tmp_path).read, RunError, folder):
        if len(run.counters) < 2:
            assert str(path) in str(run.missing)
            continue
        whole = mutant.partition(b"\n")[2]
        expected = np.frombuffer(whole[: len(whole) // 32 * 32], COUNTERS)
        for name in COUNTERS.names[1:]:
            assert np.array_equal(run.counters[1].records[name], expected[name])
        read_at_all += 1
    assert read_at_all > 100


def test_end_clocks(folder, tmp_path):
    path, read_at_all = folder / "traces" / "clocks.json", 0
    without_end = [trace.clock["offset_ns"] for trace in read_run(folder).ranks]
    for mutant, run in read_mutants(path, of_json, Following(folder, tmp_path).read, RunError, folder):
        assert [trace.clock["offset_ns"] for trace in run.ranks] == without_end[: len(run.ranks)]
        if not run.missing:
            ends = {clock["node"]: clock for clock in json.loads(mutant)}
            for trace in run.ranks:
                content = trace_path(folder / "traces", trace.identity["rank"]).read_bytes()
                first, at = spans_in(content, ends.get(trace.identity["node"]))[0], trace.records[0].tolist()
                assert (first[3], first[4]) == (at[3], at[4])
            read_at_all += 1
    assert read_at_all > 50


# --- never an object out of a file ---

OBJECTS_OUT_OF_FILES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "jsonpickle"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}


def unpickling(tree: ast.Module) -> list[str]:
    """What in a module could make objects of a file's bytes, or run them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in modules if name.split(".")[0] in OBJECTS_OUT_OF_FILES]
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called in RUNS_TEXT:
            found.append(called)
        if called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
            found.append(called)
        if called == "torch.load" and given.get("weights_only") != "True":
            found.append(called)
    return found


def test_no_file_is_unpickled():
    """What ranks send each other over MPI may be pickled: that is no file."""
    sources = [
        path for name in ("gpt2", "dist", "strategies", "traces", "scripts") for path in (ROOT / name).rglob("*.py")
    ]
    assert len(sources) > 150
    assert {str(path): found for path in sources if (found := unpickling(ast.parse(path.read_text())))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from yaml import load", "import os, shelve", "from dill.source import x", "torch.load(path)",
        "np.load(path, allow_pickle=True)", "eval(text)", "torch.load(path, weights_only=False)",
    ],
)  # fmt: skip
def test_unpickling_is_found(line):
    assert unpickling(ast.parse(line))
