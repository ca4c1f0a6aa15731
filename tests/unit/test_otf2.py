"""scripts/export.py --format otf2: what the package's own reader and Score-P's otf2-print find in the archive."""

import shutil
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest

import traces.export
from scripts.export import main as export
from tests.support.make_run import MS, simulate, three_ranks, with_counters, write_run
from tests.support.pipeline_runs import make_shared
from traces import read_run
from traces.export.collectives import COLLECTIVE_OF
from traces.read.waits import find_waits
from traces.record.phases import NAMES, PHASES, STEP

pytestmark = pytest.mark.any_mpi
NODES = [0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.fixture(autouse=True)
def otf2():
    return pytest.importorskip("otf2", reason="the package otf2 is not installed: pip install -e '.[otf2]'")


def written(run, folder):
    """The archive of a run, as the package reads it: (definitions, {location's name: [events]})."""
    import otf2.reader

    from traces.export.otf2 import export as export_otf2

    export_otf2(run, folder)
    events = defaultdict(list)
    with otf2.reader.open(str(folder / "traces.otf2")) as archive:
        for location, event in archive.events:
            events[location.name].append(event)
        return archive.definitions, events


def spans_of(events):
    """[(region's name, ns from, ns to, depth)] of one location, by a stack of what was entered."""
    stack, found = [], []
    for event in events:
        kind = type(event).__name__
        if kind == "Enter":
            stack.append((event.region.name, event.time))
        elif kind == "Leave":
            name, start = stack.pop()
            assert name == event.region.name
            found.append((name, start, event.time, len(stack)))
    assert not stack
    return found


def named(events, name):
    return [event for event in events if type(event).__name__ == name]


@pytest.mark.parametrize("strategy", ["reduce-bcast", "sliced", "reduce-scatter"])
def test_every_phase_and_every_wait_of_nine_ranks_arrives(tmp_path, strategy):
    run = read_run(write_run(tmp_path / "run", simulate(strategy, NODES), NODES, strategy=strategy))
    definitions, events = written(run, tmp_path / "out")
    assert definitions.clock_properties.timer_resolution == 10**9
    begin = min(trace.records["start"].min() for trace in run.ranks)
    for rank, (trace, waits) in enumerate(zip(run.ranks, find_waits(run), strict=True)):
        records, own = trace.records, events[f"rank {rank}"]
        expected = sorted((NAMES[one["phase"]], int(one["start"] - begin), int(one["end"] - begin)) for one in records)
        found = sorted((name, start, stop) for name, start, stop, _ in spans_of(own) if name in NAMES)
        assert found == expected
        assert [event.value for event in named(own, "ParameterUnsignedInt")] == list(range(1, 25))
        ends = named(own, "MpiCollectiveEnd")
        exchanged = np.isin(records["phase"], [NAMES.index(name) for name in COLLECTIVE_OF])
        assert len(ends) == exchanged.sum()
        assert sum(sum(event.attributes.values()) for event in ends) == waits[exchanged].sum()


def test_the_calls_of_one_step(tmp_path):
    """Three ranks, root 1, the values by hand: sizes, roots, depths, waits."""
    run = read_run(write_run(tmp_path / "run", three_ranks(steps=2, root=1), [0, 0, 1]))
    for trace in run.ranks:
        trace.records["bytes"] = 4096
    definitions, events = written(run, tmp_path / "out")
    root, other = (named(events[f"rank {rank}"], "MpiCollectiveEnd")[:2] for rank in (1, 0))
    for ends, sizes, waited in ((root, [(4096, 4096), (4096, 0)], [16, 0]), (other, [(4096, 0), (0, 4096)], [0, 15])):
        assert [(event.size_sent, event.size_received) for event in ends] == sizes
        assert [event.root for event in ends] == [1, 1]
        assert [list(event.attributes.values()) for event in ends] == [[ms * MS] for ms in waited]
    assert spans_of(events["rank 1"])[:4] == [
        ("forward", 0, 14 * MS, 1),
        ("MPI_Reduce", 14 * MS, 50 * MS, 2),
        ("reduce", 14 * MS, 50 * MS, 1),
        ("update", 50 * MS, 60 * MS, 1),
    ]
    assert spans_of(events["rank 1"])[6] == (STEP, 0, 84 * MS, 0)
    nodes = {place.name: place.group.system_tree_parent.name for place in definitions.locations}
    assert nodes == {"rank 0": "cn00", "rank 1": "cn00", "rank 2": "cn01"}


def test_what_begins_and_ends_together_is_nested(tmp_path):
    """Phases that fill their steps, which follow one another at once."""
    spans = [(step, name, -1, 3 * step, 3 * step + 3) for step in (1, 2) for name in ("forward", STEP)]
    _, events = written(read_run(write_run(tmp_path / "run", [spans], [0])), tmp_path / "out")
    assert spans_of(events["rank 0"]) == [
        (name, start * MS, (start + 3) * MS, depth) for start in (0, 3) for name, depth in (("forward", 1), (STEP, 0))
    ]


def test_port_counters_are_metrics_of_their_node(tmp_path):
    """Bytes since the first sample; one that was set back has not grown."""
    run = with_counters(read_run(write_run(tmp_path / "run", simulate("allreduce", NODES), NODES)), [1, 3])
    records = run.counters[1].records
    records["in"] = [500_000, 900_000, 100_000]
    _, events = written(run, tmp_path / "out")
    found = {name: [(event.time, list(event.values)) for event in named(own, "Metric")]
             for name, own in events.items() if named(own, "Metric")}  # fmt: skip
    assert found == {
        "ports of node 1": [(10 * MS, [0, 0, 0]), (110 * MS, [200_000, 400_000, 0]), (120 * MS, [200_000, 400_000, 0])],
        "ports of node 3": [(10 * MS, [0, 0, 0]), (110 * MS, [400_000, 800_000, 0]), (120 * MS, [400_000, 800_000, 0])],
    }


def test_messages_and_groups_of_ranks_that_share_models(tmp_path):
    """2 copies of 2 parts of 2 stages: each message is sent and received once, in the same order, of the same size."""
    run = make_shared(
        tmp_path / "run", mesh=(2, 2, 2), tau_ms=(30.0, 30.0), layers="2,2", tensor_ms=1.0, exchange_ms=1.0,
        micro_steps=2, steps=3,
    )  # fmt: skip
    _, events = written(run, tmp_path / "out")
    ranks = {name: int(name.partition("(rank ")[2].rstrip(")")) for name in events}
    sent, received, members = defaultdict(list), defaultdict(list), defaultdict(set)
    for name, own in events.items():
        for event in named(own, "MpiSend"):
            sent[ranks[name], event.receiver].append(event.msg_length)
        for event in named(own, "MpiRecv"):
            received[event.sender, ranks[name]].append(event.msg_length)
        for event in named(own, "MpiCollectiveEnd"):
            group = tuple(ranks[place.name] for place in event.communicator.group.members)
            assert ranks[name] in group
            members[len(group)].add(group)
    assert sent == received
    assert set(sent) == {(low, low + 4) for low in range(4)} | {(low + 4, low) for low in range(4)}
    assert {size: len(groups) for size, groups in members.items()} == {2: 8, 4: 2, 8: 1}
    assert {tuple(sorted(group)) for group in members[4]} == {(0, 1, 4, 5), (2, 3, 6, 7)}


def test_score_ps_own_reader_agrees(tmp_path):
    """otf2-print, of Debian's otf2-tools: as many events of each kind as the run has."""
    printer = shutil.which("otf2-print")
    if printer is None:
        pytest.skip("otf2-print is not installed: apt-get install otf2-tools")
    run = read_run(write_run(tmp_path / "run", three_ranks(steps=2, root=1), [0, 0, 1]))
    written(run, tmp_path / "out")
    printed = subprocess.run([printer, tmp_path / "out" / "traces.otf2"], capture_output=True, text=True, check=True)
    kinds = Counter(line.split()[0] for line in printed.stdout.splitlines() if line[:1].isupper())
    phases = sum(int((trace.records["phase"] < len(PHASES)).sum()) for trace in run.ranks)
    steps = sum(len(trace.records) for trace in run.ranks) - phases
    exchanges = kinds["MPI_COLLECTIVE_END"]
    assert exchanges == kinds["MPI_COLLECTIVE_BEGIN"] == 3 * 2 * 2
    assert kinds["ENTER"] == kinds["LEAVE"] == phases + steps + exchanges
    assert kinds["PARAMETER_UINT64"] == steps == 6


def test_the_command(tmp_path, capsys):
    run, out = write_run(tmp_path / "run", three_ranks(3), [0, 0, 1]), tmp_path / "archive"
    assert export([str(run), "--format", "otf2", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'traces.otf2'}\n"
    assert (out / "traces.otf2").is_file()
    assert export([str(run), "--format", "otf2", "--out", str(out)]) == 2
    assert "exists already, expected the name of a new folder" in capsys.readouterr().err


def test_a_missing_package_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "otf2", None)
    monkeypatch.delitem(sys.modules, "traces.export.otf2", raising=False)
    monkeypatch.delattr(traces.export, "otf2", raising=False)
    run = write_run(tmp_path / "run", three_ranks(3), [0, 0, 1])
    assert export([str(run), "--format", "otf2", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install -e '.[otf2]'" in told
    assert not (tmp_path / "out").exists()
