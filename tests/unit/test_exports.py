"""scripts/export.py: what Paraver and Perfetto get, read by checkers of our own."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import chrome_check, paraver_check
from tests.support.make_run import MS, simulate, three_ranks, with_counters, write_run
from tests.support.pipeline_runs import make_shared
from traces import RunError, read_run
from traces.export import chrome, line_merge, paraver
from traces.export.spans import lay_out
from traces.read.waits import find_waits
from traces.record.phases import COMPUTE, EXCHANGE, INDEX, NAMES, STEP

ROOT = Path(__file__).parents[2]
NODES = [0, 1, 1, 2, 2, 3, 3, 4, 4]
RUNNING, GROUP_COMMUNICATION = 1, 13
COLLECTIVE, SEND, RECEIVE, COLLECTIVE_ROOT, WAITED = 50000002, 50100001, 50100002, 50100003, 90000020
COMMUNICATOR, PHASE = 50100004, 90000001


def export(run, folder, name="out"):
    """Both exports, checked."""
    prv, *_ = paraver.export(run, folder / f"{name}.prv")
    (path,) = chrome.export(run, folder / f"{name}.json")
    return paraver_check.check(prv), chrome_check.check(path)


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
    assert prv.header == paraver_check.Header(184 * MS, [1, 1, 2], [1, 1, 2], [[1, 2, 3]])
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
    with pytest.raises(RunError, match="where all ranks ran"):
        chrome.export(dataclasses.replace(run, ranks=run.ranks[:2]), tmp_path / "a.json")


def test_a_run_that_traced_nothing(tmp_path):
    run = read_run(write_run(tmp_path / "run", [[], []], [0, 1]))
    for exporter in (paraver, chrome):
        with pytest.raises(RunError, match="contains no phase"):
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
    (tmp_path / "file").touch()
    for from_run, out in ((tmp_path / "nowhere", tmp_path / "a"), (run, tmp_path / "file" / "a")):
        result = command(from_run, "--format", "paraver", "--out", out)
        assert result.returncode == 2
        assert result.stderr.startswith("export.py: error: ")
        assert result.stderr.count("\n") == 1


def command(*arguments):
    script = [sys.executable, str(ROOT / "scripts" / "export.py")]
    return subprocess.run([*script, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_phase_is_the_state_that_bscs_tools_take_it_for():
    """Useful is what computes; waiting is Synchronization, an exchange Group Communication."""
    labels = {name: paraver.STATES[paraver.STATE_OF[name]][0] for name in NAMES if name != STEP}
    assert {name for name, label in labels.items() if label == "Running"} == {*COMPUTE, "eval"}
    assert {name for name, label in labels.items() if label == "Group Communication"} == set(EXCHANGE)
    assert (labels["recv"], labels["send"]) == ("Waiting a message", "Immediate Send")
    assert (labels["wait"], labels["data"], labels["copy_in"]) == ("Synchronization", "I/O", "Memory transfer")


def test_the_names_of_phases_are_those_of_their_events():
    """A phase's event has its number from 1 on, 0 is its end."""
    names = paraver.pcf_text("ring").partition("Training phase\nVALUES\n")[2].partition("EVENT_TYPE")[0].split()
    assert dict(zip(names[1::2], map(int, names[::2]), strict=True)) == {
        "End": 0, **{name: 1 + INDEX[name] for name in NAMES if name != STEP},
    }  # fmt: skip


def test_a_counter_that_was_set_back_is_no_rate_below_nothing(tmp_path):
    """A driver that was loaded anew: of that moment nothing is known, before and after it the rates are."""
    run = read_run(write_run(tmp_path, three_ranks(3), [0, 0, 1], samples=[[(0, 0, 0)], [(0, 0, 0)]]))
    begin = min(trace.records["start"].min() for trace in run.ranks)
    (first, *_) = with_counters(run, [0]).counters
    records = np.zeros(4, first.records.dtype)
    records["time"], records["in"] = begin + np.array([0, 10, 20, 30]) * MS, [5000, 7000, 100, 400]
    first.records = records
    _, rates = lay_out(dataclasses.replace(run, counters=[first])).counted[0]
    assert rates["in"].tolist() == [200_000, 0, 30_000, 0]


def test_spans_that_took_no_time_are_left_out(tmp_path):
    """A viewer would show an edge where nothing was."""
    spans = three_ranks(3)
    spans[1].insert(2, (1, "update", -1, 145, 145))
    laid = lay_out(read_run(write_run(tmp_path, spans, [0, 0, 1])))
    assert INDEX["update"] not in laid.ranks[1].phases["phase"]
    assert all((rank.phases["end"] > rank.phases["start"]).all() for rank in laid.ranks)


# --- ranks that share models ---


def test_ranks_that_share_models_meet_in_their_groups(tmp_path):
    """2 copies of 2 parts of 2 stages: who meets whom, what a collective's share is of; stages are a group, too."""
    run = make_shared(
        tmp_path / "run", mesh=(2, 2, 2), tau_ms=(30.0, 30.0), layers="2,2", tensor_ms=1.0, exchange_ms=1.0,
        micro_steps=2, steps=3,
    )  # fmt: skip
    prv, slices = export(run, tmp_path)
    expected = {"tensor": [[1, 2], [3, 4], [5, 6], [7, 8]], "allreduce": [[1, 3], [2, 4], [5, 7], [6, 8]]}
    expected |= {"norm": [[1, 2, 5, 6], [3, 4, 7, 8]], "wait": [[1, 2, 3, 4, 5, 6, 7, 8]]}
    found = {name: set() for name in expected}
    for task, events in prv.events.items():
        for _, pairs in events:
            if pairs.get(COLLECTIVE):
                members = prv.header.communicators[pairs[COMMUNICATOR] - 1]
                assert task in members
                found[NAMES[pairs[PHASE] - 1]].add(tuple(members))
    assert {name: sorted(map(list, groups)) for name, groups in found.items()} == expected
    of_stages = [[1, 5], [2, 6], [3, 7], [4, 8]]
    every = [group for groups in (*expected.values(), of_stages) for group in groups]
    assert sorted(prv.header.communicators) == sorted(every)
    assert slices.names[1, 5] == "replica 0 stage 1 shard 0 (rank 4)"
    assert [slices.names[who] for who in sorted(slices.order, key=slices.order.get)][:4] == [
        "replica 0 stage 0 shard 0 (rank 0)", "replica 0 stage 0 shard 1 (rank 1)",
        "replica 0 stage 1 shard 0 (rank 4)", "replica 0 stage 1 shard 1 (rank 5)",
    ]  # fmt: skip
    assert "replica 0 stage 1 shard 0 (rank 4) @ cn00" in (tmp_path / "out.row").read_text()


def test_a_share_is_of_the_group_that_meets(tmp_path):
    run = make_shared(tmp_path / "run", mesh=(2, 1, 2), tau_ms=(30.0, 30.0), layers="2,2", exchange_ms=1.0, steps=3)
    for trace in run.ranks:
        trace.records["phase"][trace.records["phase"] == INDEX["allreduce"]] = INDEX["allgather"]
    prv, _ = export(run, tmp_path)
    calls = [pairs for _, pairs in prv.events[1] if pairs.get(PHASE) == INDEX["allgather"] + 1]
    assert {(pairs[SEND], pairs[RECEIVE]) for pairs in calls} == {(500, 1000)}


def test_a_message_that_is_waited_for_is_shown_so(tmp_path):
    run = make_shared(
        tmp_path / "run", mesh=(1, 1, 2), tau_ms=(30.0, 30.0), layers="2,2", micro_steps=1, steps=3, noise=0.0
    )  # fmt: skip
    prv, slices = export(run, tmp_path)
    received = [one for one in slices.slices[1, 2] if one[1] in ("recv", "wait", "transfer")][:3]
    assert [(depth, name) for depth, name, *_ in received] == [(1, "recv"), (2, "wait"), (2, "transfer")]
    assert received[1][3] - received[1][2] == pytest.approx(10 * MS, abs=0.1 * MS)
    assert not any(pairs.get(COLLECTIVE) for _, pairs in prv.events[2] if pairs.get(PHASE) == INDEX["recv"] + 1)
