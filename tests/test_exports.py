"""scripts/export.py: what Paraver and Perfetto get, read by checkers of our own; the checkers on broken traces."""

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chrome_check
import numpy as np
import paraver_check
import pytest
from make_run import MS, simulate, three_ranks, write_run

from traces import RunError, chrome, line_merge, paraver, read_run
from traces.phases import COMPUTE, EXCHANGE, INDEX, NAMES, STEP
from traces.waiting import find_waits

ROOT = Path(__file__).parent.parent
NODES = [0, 1, 1, 2, 2, 3, 3, 4, 4]
COUNTERS = np.dtype([("time", "<i8"), ("in", "<i8"), ("out", "<i8"), ("stalled", "<i8")])
RUNNING, GROUP_COMMUNICATION = 1, 13
COLLECTIVE, SEND, RECEIVE, COLLECTIVE_ROOT, WAITED = 50000002, 50100001, 50100002, 50100003, 90000020


def export(run, folder, name="out"):
    """Both exports, checked."""
    prv, *_ = paraver.export(run, folder / f"{name}.prv")
    (path,) = chrome.export(run, folder / f"{name}.json")
    return paraver_check.check(prv), chrome_check.check(path)


def with_counters(run, nodes):
    """Node n's port: (n+1) MB/s in, twice as much out, from 10 ms to 110 ms after the start; then nothing."""
    begin = min(trace.records["start"].min() for trace in run.ranks)
    counters = []
    for node in nodes:
        bytes_in = np.array([0, (node + 1) * 100_000, (node + 1) * 100_000])
        rows = zip(begin + np.array([10, 110, 120]) * MS, bytes_in, 2 * bytes_in, 0 * bytes_in, strict=True)
        records = np.array([tuple(row) for row in rows], COUNTERS)
        counters.append(SimpleNamespace(node=node, host=f"cn{node:02d}", ports=["eth0"], records=records))
    object.__setattr__(run, "counters", counters)
    return run


def phase_ns(run, rank, names):
    records = run.ranks[rank].records
    records = records[np.isin(records["phase"], [INDEX[name] for name in names])]
    return int((records["end"] - records["start"]).sum())


@pytest.mark.parametrize("strategy", ["reduce-bcast", "sliced", "reduce-scatter", "allreduce"])
def test_nine_ranks_on_five_nodes(tmp_path, strategy):
    """Every nanosecond of computing and exchanging arrives in both, and so does every wait."""
    dedicated = strategy == "reduce-bcast"
    spans = simulate(strategy, NODES, dedicated=dedicated)
    run = with_counters(read_run(write_run(tmp_path / "run", spans, NODES, strategy=strategy)), range(5))
    prv, slices = export(run, tmp_path)
    waits = find_waits(run)
    for rank in range(9):
        task, thread = rank + 1, slices.slices[NODES[rank] + 1, rank + 1]
        compute, exchange = phase_ns(run, rank, COMPUTE), phase_ns(run, rank, EXCHANGE)
        in_state = {state: sum(end - begin for begin, end, s in prv.states[task] if s == state) for state in (1, 13)}
        assert in_state == {RUNNING: compute, GROUP_COMMUNICATION: exchange}
        length = dict.fromkeys(NAMES, 0) | {"wait": 0, "transfer": 0}
        for _, name, start, end, _ in thread:
            length[name.split()[0]] += end - start
        assert sum(length[name] for name in EXCHANGE) == length["wait"] + length["transfer"] == exchange
        assert sum(length[name] for name in COMPUTE) == compute
        assert length[STEP] == phase_ns(run, rank, [STEP])
        assert length["wait"] == waits[rank].sum()
        assert sum(pairs.get(WAITED, 0) for _, pairs in prv.events[task]) == waits[rank].sum()
        assert [name for depth, name, *_ in thread if depth == 0] == [f"step {step}" for step in range(1, 25)]


def test_the_calls_of_one_step(tmp_path):
    """Three ranks, the values by hand: sizes, roots, waits, times from the run's start."""
    spans = three_ranks(steps=2, root=1)
    run = read_run(write_run(tmp_path / "run", spans, [0, 0, 1]))
    for trace in run.ranks:
        trace.records["bytes"] = 4096
    prv, slices = export(run, tmp_path)
    assert prv.header == paraver_check.Header(184 * MS, [1, 1, 2], [1, 1, 2])
    root = [(time, pairs) for time, pairs in prv.events[2] if COLLECTIVE in pairs][:4]
    assert [time for time, _ in root] == [14 * MS, 50 * MS, 60 * MS, 80 * MS]
    assert [pairs[COLLECTIVE] for _, pairs in root] == [9, 0, 7, 0]
    assert [(pairs[SEND], pairs[RECEIVE], pairs[COLLECTIVE_ROOT]) for _, pairs in root[::2]] == [
        (4096, 4096, 1),
        (4096, 0, 1),
    ]
    assert [pairs[WAITED] for _, pairs in root] == [16 * MS, 0, 0, 0]
    other = [pairs for _, pairs in prv.events[1] if COLLECTIVE in pairs][:4]
    assert [(pairs[SEND], pairs[RECEIVE]) for pairs in other[::2]] == [(4096, 0), (0, 4096)]
    assert not any(COLLECTIVE_ROOT in pairs for pairs in other)
    assert [pairs[WAITED] for pairs in other] == [0, 0, 15 * MS, 0]
    assert slices.slices[1, 2][:5] == [
        (0, "step 1", 0, 84 * MS, {}),
        (1, "forward", 0, 14 * MS, {"step": 1}),
        (1, "reduce", 14 * MS, 50 * MS, {"step": 1, "bytes": 4096}),
        (2, "wait", 14 * MS, 30 * MS, {}),
        (2, "transfer", 30 * MS, 50 * MS, {}),
    ]


@pytest.mark.parametrize(
    ("phase", "root", "call"),
    [
        ("reduce", 0, (9, 600, 600)),
        ("reduce", -1, (168, 600, 200)),
        ("bcast", 0, (7, 600, 0)),
        ("bcast", -1, (17, 200, 600)),
        ("reduce_scatter", -1, (168, 600, 200)),
        ("allreduce", -1, (10, 600, 600)),
        ("allgather", -1, (17, 200, 600)),
        ("wait", -1, (8, 0, 0)),
    ],
)
def test_each_exchange_is_the_collective_of_its_meaning(tmp_path, phase, root, call):
    """As rank 0 of 3 makes it with 600 bytes; a rooted one without a root is a slice to every rank."""
    spans = [[(1, phase, root, 1, 2), (1, STEP, -1, 0, 3)] for _ in range(3)]
    run = read_run(write_run(tmp_path / "run", spans, [0, 1, 2]))
    for trace in run.ranks:
        trace.records["bytes"] = 600
    prv, _ = export(run, tmp_path)
    (made,) = [pairs for _, pairs in prv.events[1] if pairs.get(COLLECTIVE)]
    assert (made[COLLECTIVE], made[SEND], made[RECEIVE]) == call


def test_the_ports_rates_are_the_nodes(tmp_path):
    run = read_run(write_run(tmp_path / "run", simulate("allreduce", NODES), NODES))
    prv, slices = export(with_counters(run, [1, 3]), tmp_path)
    rates = {
        task: [(time, pairs[90000010], pairs[90000011]) for time, pairs in events if 90000010 in pairs]
        for task, events in prv.events.items()
    }
    # The first ranks of nodes 1 and 3 are ranks 1 and 5.
    assert {task: found for task, found in rates.items() if found} == {
        2: [(10 * MS, 2_000_000, 4_000_000), (110 * MS, 0, 0), (120 * MS, 0, 0)],
        6: [(10 * MS, 4_000_000, 8_000_000), (110 * MS, 0, 0), (120 * MS, 0, 0)],
    }
    assert slices.counters[4][0] == (10 * MS, {"in": 4.0, "out": 8.0})
    assert set(slices.counters) == {2, 4}


def test_a_crashed_run(tmp_path):
    """The last step without its envelope, a rank without a file: the one is closed, the other an empty row."""
    spans = three_ranks(steps=4)
    for rank in range(3):
        spans[rank] = [span for span in spans[rank] if span[0] < 4 or span[1] in ("forward", "reduce")]
    run = read_run(write_run(tmp_path / "run", spans, [0, 0, 1]))
    run = dataclasses.replace(run, ranks=run.ranks[:2])
    prv, slices = export(run, tmp_path)
    assert [pairs[90000002] for _, pairs in prv.events[1] if 90000002 in pairs] == [1, 0, 2, 0, 3, 0, 4, 0]
    assert prv.states[3] == [(0, prv.header.end, 0)]
    assert [name for depth, name, *_ in slices.slices[1, 1] if depth == 0][-1] == "step 4"
    assert slices.names[2, 3] == "rank 2"


def test_without_the_places_in_config_json(tmp_path):
    run = read_run(write_run(tmp_path / "run", three_ranks(), [0, 0, 1]))
    export(run, tmp_path, "with")
    del run.config["ranks"]
    export(run, tmp_path, "without")
    assert (tmp_path / "with.row").read_text() == (tmp_path / "without.row").read_text()
    with pytest.raises(RunError, match="where all ranks sat"):
        chrome.export(dataclasses.replace(run, ranks=run.ranks[:2]), tmp_path / "a.json")


def test_a_run_that_traced_nothing(tmp_path):
    run = read_run(write_run(tmp_path / "run", [[], []], [0, 1]))
    for exporter in (paraver, chrome):
        with pytest.raises(RunError, match="no phase is in it"):
            exporter.export(run, tmp_path / "out")


def test_nothing_is_lost_between_two_windows_of_lines(tmp_path, monkeypatch):
    run = read_run(write_run(tmp_path / "run", simulate("sliced", NODES), NODES))
    export(run, tmp_path, "whole")
    monkeypatch.setattr(line_merge, "LINES_AT_ONCE", 50)
    export(run, tmp_path, "pieces")
    for ending in (".prv", ".json"):
        assert (tmp_path / f"pieces{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()


@pytest.mark.parametrize(
    ("form", "out", "names"),
    [
        ("paraver", "a/b", ["b.prv", "b.pcf", "b.row"]),
        ("paraver", "b.prv.gz", ["b.prv.gz", "b.pcf", "b.row"]),
        ("perfetto", "b.json.gz", ["b.json.gz"]),
    ],
)
def test_the_command(tmp_path, form, out, names):
    run = write_run(tmp_path / "run", three_ranks(3), [0, 0, 1])
    result = command(run, "--format", form, "--out", tmp_path / out)
    assert result.returncode == 0, result.stderr
    paths = [Path(line) for line in result.stdout.splitlines()]
    assert [path.name for path in paths] == names
    checker = paraver_check if form == "paraver" else chrome_check
    checker.check(paths[0])


def test_the_commands_mistakes_are_one_line(tmp_path):
    run = write_run(tmp_path / "run", three_ranks(), [0, 0, 1])
    (tmp_path / "file").write_text("")
    for from_run, out in ((tmp_path / "nowhere", tmp_path / "a"), (run, tmp_path / "file" / "a")):
        result = command(from_run, "--format", "paraver", "--out", out)
        assert result.returncode == 2
        assert result.stderr.startswith("export.py: error: ")
        assert result.stderr.count("\n") == 1


def command(*arguments):
    script = [sys.executable, str(ROOT / "scripts" / "export.py")]
    return subprocess.run([*script, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=60)


# --- the checkers, on broken traces ---


def edit(path, old, new, count=1):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def move_line(path, begins, to):
    lines = path.read_text().splitlines(keepends=True)
    (index,) = [number for number, line in enumerate(lines) if line.startswith(begins)][:1]
    lines.insert(to, lines.pop(index))
    path.write_text("".join(lines))


BROKEN_PARAVER = {
    "no header": (("prv", "#Paraver", "#Parrot"), "header"),
    "a node less": (("prv", ":2(2,1):", ":3(2,1):"), "nodes"),
    "a task less": (("prv", ":1:3(1:1,1:1,1:2)", ":1:4(1:1,1:1,1:2)"), "tasks"),
    "CPUs": (("prv", ":2(2,1):", ":2(2,2):"), "one CPU a rank"),
    "communicator": (("prv", "c:1:1:3:1:2:3", "c:1:1:3:1:2:4"), "communicator"),
    "CPU of another node": (("prv", "\n1:3:1:3:1:", "\n1:1:1:3:1:"), "another node"),
    "CPU of another task": (("prv", "\n1:1:1:1:1:", "\n1:2:1:1:1:"), "another CPU"),
    "beyond the end": (("prv", "_ns", "_ns".replace("_", "0_")), "to the end"),
    "before the end": (("prv", "184000000_ns", "18400000_ns"), "beyond the end"),
    "states overlap": (("prv", "1:1:1:1:1:0:10000000:1", "1:1:1:1:1:0:11000000:1"), "overlap"),
    "a hole": (("prv", "1:1:1:1:1:0:10000000:1", "1:1:1:1:1:0:9000000:1"), "no state"),
    "no length": (("prv", "1:1:1:1:1:0:10000000:1", "1:1:1:1:1:0:0:1"), "without length"),
    "no exit": (("prv", "50000002:0:", ""), "twice"),
    "no entry": (("prv", "90000001:9", "90000001:0"), "twice"),
    "step not closed": (("prv", "184000000:90000002:0", "184000000:90000020:0", 3), "not closed"),
    "no size": (("prv", "50100001:0:", ""), "lacks"),
    "another call": (("prv", "50000002:9:", "50000002:7:"), "another one"),
    "two roots": (("prv", "50100004:1:90000001", "50100004:1:50100003:1:90000001"), "roots"),
    "no root": (("prv", ":50100003:1", ""), "roots"),
    "negative": (("prv", "90000020:16000000", "90000020:-1"), "not a record"),
    "state without a name": (("pcf", "13    Group Communication\n", ""), "differ"),
    "unknown state": (("prv", "10000000:1\n", "10000000:3\n"), "without a name"),
    "type without a name": (("pcf", "6    90000020    W", "6    90000021    W"), "has no name"),
    "value without a name": (("pcf", "9    MPI_Reduce\n", ""), "has no name"),
    "type twice": (("pcf", "90000012", "90000011"), "again"),
    "rows": (("row", "LEVEL CPU SIZE 3", "LEVEL CPU SIZE 2"), "first line"),
    "row names": (("row", "cn00\ncn01", "cn00"), "NODE has 1"),
    "a level": (("row", "LEVEL TASK", "LEVEL CPU"), "CPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_PARAVER)
def test_the_paraver_checker_finds(tmp_path, case):
    run = read_run(write_run(tmp_path / "run", three_ranks(2, root=1), [0, 0, 1]))
    paraver.export(run, tmp_path / "a.prv")
    paraver_check.check(tmp_path / "a.prv")
    (ending, *change), says = BROKEN_PARAVER[case]
    edit(tmp_path / f"a.{ending}", *change)
    with pytest.raises(paraver_check.Broken, match=says):
        paraver_check.check(tmp_path / "a.prv")


def test_the_paraver_checker_finds_what_is_not_sorted(tmp_path):
    run = read_run(write_run(tmp_path / "run", three_ranks(2), [0, 0, 1]))
    paraver.export(run, tmp_path / "a.prv")
    move_line(tmp_path / "a.prv", "1:1:1:1:1:10000000:", 3)
    with pytest.raises(paraver_check.Broken, match="time goes back"):
        paraver_check.check(tmp_path / "a.prv")


def change(**values):
    return lambda event: event | values


BROKEN_CHROME = {
    "pid 0": ("reduce", change(pid=0), "pid"),
    "no tid": ("reduce", change(tid=None), "tid"),
    "tid in words": ("reduce", change(tid="1"), "tid"),
    "kind": ("reduce", change(ph="B"), "another kind"),
    "no time": ("reduce", change(ts=None), "time"),
    "back in time": ("bcast", change(ts=1.0), "time"),
    "no length": ("reduce", change(dur=0), "length"),
    "no category": ("reduce", change(cat=""), "category"),
    "overlap": ("forward", change(dur=40000.5), "overlaps"),
    "out of the step": ("bcast", change(dur=90000), "overlaps"),
    "a phase in a phase": ("transfer", change(name="forward"), "inside reduce"),
    "a transfer of nothing": ("forward", change(name="transfer"), "inside step"),
    "words counted": ("ports MB/s", change(args={"in": "1"}), "not numbers"),
    "not a number": ("ports MB/s", change(args={"in": float("nan")}), "not numbers"),
    "a rank without a name": ("thread_name", change(tid=9), "has no name"),
    "a name twice": ("thread_name", change(tid=2), "twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_CHROME)
def test_the_chrome_checker_finds(tmp_path, case):
    run = with_counters(read_run(write_run(tmp_path / "run", three_ranks(2), [0, 0, 1])), [0])
    chrome.export(run, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    name, edited, says = BROKEN_CHROME[case]
    index = next(number for number, event in enumerate(document["traceEvents"]) if event["name"] == name)
    document["traceEvents"][index] = edited(document["traceEvents"][index])
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(chrome_check.Broken, match=says):
        chrome_check.check(tmp_path / "a.json")


def test_the_chrome_checker_finds_a_time_unit(tmp_path):
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        json.dump({"traceEvents": [], "displayTimeUnit": "ms"}, file)
    with pytest.raises(chrome_check.Broken, match="displayTimeUnit"):
        chrome_check.check(tmp_path / "a.json.gz")
