"""The files of RUN/traces, to be damaged: as runs.py says."""

import json
import struct
from pathlib import Path

import numpy as np

from tests.suites.damaged.runs import Following, case, measured_run, of_json
from tests.support.mutations import Damaged, Mutator
from traces import read_run
from traces.record.files import COUNTERS, END_LINKS, RECORD, counters_path, trace_path
from traces.record.phases import NAMES


def of_trace(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_header_and_records(content, RECORD.itemsize)


def of_counters(mutator: Mutator, content: bytes) -> bytes:
    return mutator.of_header_and_records(content, COUNTERS.itemsize)


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


def trace(folder: Path) -> Damaged:
    run = measured_run(folder)
    end = {clock["node"]: clock for clock in json.loads((run / "traces" / "clocks.json").read_text())}

    def judge(mutant, value):
        if value is not None and not value.missing:
            records = [(step, NAMES[phase], *rest) for step, phase, *rest in value.ranks[1].records.tolist()]
            assert records == spans_in(mutant, end[value.ranks[1].identity["node"]])

    return case(run, trace_path(run / "traces", 1), of_trace, Following(run, folder), judge, least=10)


def counters(folder: Path) -> Damaged:
    run = measured_run(folder)
    path = counters_path(run / "traces", 1)

    def judge(mutant, value):
        if len(value.counters) < 2:
            assert str(path) in str(value.missing)
            return
        whole = mutant.partition(b"\n")[2]
        expected = np.frombuffer(whole[: len(whole) // 32 * 32], COUNTERS)
        for name in COUNTERS.names[1:]:
            assert np.array_equal(value.counters[1].records[name], expected[name])

    return case(run, path, of_counters, Following(run, folder), judge, least=10)


def end_clocks(folder: Path) -> Damaged:
    run = measured_run(folder)
    without_end = [trace.clock["offset_ns"] for trace in read_run(run).ranks]

    def judge(mutant, value):
        if value is None:  # the clocks of all nodes contradict the traces
            return
        assert [trace.clock["offset_ns"] for trace in value.ranks] == without_end[: len(value.ranks)]
        if not value.missing:
            ends = {clock["node"]: clock for clock in json.loads(mutant)}
            for one in value.ranks:
                content = trace_path(run / "traces", one.identity["rank"]).read_bytes()
                first, at = spans_in(content, ends.get(one.identity["node"]))[0], one.records[0].tolist()
                assert (first[3], first[4]) == (at[3], at[4])

    return case(run, run / "traces" / "clocks.json", of_json, Following(run, folder), judge, least=5)


def end_links(folder: Path) -> Damaged:
    run = measured_run(folder)
    before = read_run(run).start_links

    def judge(mutant, value):
        expected = {} if value.missing else {link["node"]: link for link in json.loads(mutant)}
        assert value.end_links == expected
        for node, link in before.items():
            at_end = value.end_links.get(node, link)
            assert all(value.links[node][way] == max(link[way], at_end[way]) for way in ("in", "out"))

    return case(run, run / "traces" / END_LINKS, of_json, Following(run, folder), judge, least=5)
