"""The trace files and run folders: what is written reads back, and broken ones are one clear line."""

import json

import numpy as np
import pytest

from tests.support.make_run import IDENTITY, MS, three_ranks, write_run
from traces import RunError, read_run
from traces.read import schemas
from traces.read.analysis import measure
from traces.record import files
from traces.record.phases import NAMES, STEP

# --- files ---


def test_the_record_is_36_bytes_little_endian():
    record = np.array([(1, 2, -1, 3, 4, 5)], files.RECORD)
    numbers = (1, 2, -1), (3, 4, 5)
    expected = b"".join(number.to_bytes(4, "little", signed=True) for number in numbers[0])
    expected += b"".join(number.to_bytes(8, "little") for number in numbers[1])
    assert record.tobytes() == expected


def test_a_run_reads_back_on_rank_0s_clock(tmp_path):
    write_run(tmp_path, three_ranks(2), [0, 0, 1], offsets_ns=[0, 0, -5_000_000_000])
    run = read_run(tmp_path)
    assert run.config["parameters"] == 124439808
    assert [row["step"] for row in run.log] == [1, 2]
    assert [trace.identity["node"] for trace in run.ranks] == [0, 0, 1]
    # Rank 2's own times lie 5 s later.
    raw = np.fromfile(files.trace_path(tmp_path / "traces", 2), files.RECORD, offset=header_length(tmp_path, 2))
    assert raw["start"][0] == 100 * MS + 5_000_000_000
    assert [trace.records["start"][0] for trace in run.ranks] == [100 * MS] * 3
    assert run.ranks[2].records["end"][-1] == 284 * MS


def header_length(folder, rank):
    return files.trace_path(folder / "traces", rank).read_bytes().index(b"\n") + 1


@pytest.mark.parametrize(("server", "label"), [("dedicated", "reduce-bcast dedicated"), ("colocated", "reduce-bcast")])
def test_the_label_tells_a_dedicated_server(tmp_path, server, label):
    assert read_run(write_run(tmp_path, three_ranks(), [0, 0, 1], "reduce-bcast", server=server)).label == label


def test_a_torn_record_and_a_torn_log_line_are_dropped(tmp_path):
    write_run(tmp_path, three_ranks(2), [0, 0, 1])
    whole = len(read_run(tmp_path).ranks[1].records)
    path = files.trace_path(tmp_path / "traces", 1)
    path.write_bytes(path.read_bytes()[:-5])
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "loss"')
    run = read_run(tmp_path)
    assert len(run.ranks[1].records) == whole - 1
    assert [row["step"] for row in run.log] == [1, 2]
    # Its envelope gone, the last step is no longer complete on all ranks.
    assert measure(run).steps.tolist() == [1]


def test_of_a_step_logged_twice_the_later_line_counts(tmp_path):
    log = [{"step": step, "loss": loss} for step, loss in ((1, 5.0), (2, 4.0), (2, 3.5), (3, 3.0))]
    write_run(tmp_path, three_ranks(), [0, 0, 1], log=log)
    assert [row["loss"] for row in read_run(tmp_path).log] == [5.0, 3.5, 3.0]


def test_phases_of_another_order_are_read_by_name(tmp_path):
    write_run(tmp_path, three_ranks(), [0, 0, 1])
    before = read_run(tmp_path).ranks[0].records
    path = files.trace_path(tmp_path / "traces", 0)
    line, _, _ = path.read_bytes().partition(b"\n")
    header = json.loads(line) | {"phases": NAMES[::-1]}
    turned = before.copy()
    turned["phase"] = len(NAMES) - 1 - before["phase"]
    path.write_bytes(json.dumps(header).encode() + b"\n" + turned.tobytes())
    assert np.array_equal(read_run(tmp_path).ranks[0].records, before)


def break_header(**changes):
    def change(folder):
        path = files.trace_path(folder / "traces", 1)
        line, _, rest = path.read_bytes().partition(b"\n")
        path.write_bytes(json.dumps(json.loads(line) | changes).encode() + b"\n" + rest)

    return change


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def overwrite(name, text):
    return lambda folder: (folder / name).write_text(text)


TRACES = [f"traces/rank-0000{rank}.trace" for rank in range(3)]
BROKEN = {
    "no config": (remove("config.json"), r"config\.json is missing.*not a run folder"),
    "config not JSON": (overwrite("config.json", "{"), r"config\.json is not what scripts/train\.py writes"),
    "config without strategy": (overwrite("config.json", '{"format": "gpt2-mpi run 1"}'), r"settings\.strategy"),
    "config of another version": (
        overwrite("config.json", '{"format": "gpt2-mpi run 2"}'),
        r"config\.json has format 'gpt2-mpi run 2', expected 'gpt2-mpi run 1'; read it with the release that wrote it",
    ),
    "no log": (remove("log.jsonl"), r"log\.jsonl is missing"),
    "log not JSON": (overwrite("log.jsonl", '{"step": 1}\nsteps\n'), r"log\.jsonl, line 2"),
    "no traces": (remove(*TRACES), r"no rank-\*\.trace files; train with --trace on"),
    "one rank missing": (remove(TRACES[1]), r"lacks 1 of 3 ranks' files \(rank-00001\.trace\)"),
    "foreign file": (overwrite(TRACES[1], "hello\nworld"), r"rank-00001\.trace is not a trace file"),
    "JSON, but no trace": (overwrite(TRACES[1], '["format"]\n'), r"rank-00001\.trace is not a trace file"),
    "empty file": (overwrite(TRACES[1], ""), r"rank-00001\.trace is not a trace file"),
    "other version": (
        break_header(version=2),
        r"has trace version 2, expected 1; read it with the release that wrote it",
    ),
    "other phases": (break_header(phases=["dance"]), r"phases unknown here: dance"),
    "fewer phases": (break_header(phases=["data"]), r"is damaged"),
    "other run's rank": (
        break_header(identity=IDENTITY | {"rank": 1, "ranks": 9}),
        r"another run \(rank 1 of 9, .*3 ranks",
    ),
    "other rank's file": (break_header(identity=IDENTITY | {"rank": 2, "ranks": 3}), r"another run \(rank 2 of 3"),
    "half a header": (break_header(identity={}), r"is damaged: its header lacks rank, ranks"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_run_folder_is_one_clear_line(tmp_path, case):
    change, text = BROKEN[case]
    change(write_run(tmp_path, three_ranks(), [0, 0, 1]))
    with pytest.raises(RunError, match=text) as caught:
        read_run(tmp_path, allow_missing=case == "config of another version")
    assert "\n" not in str(caught.value)


SPANS_NO_TRACER_WRITES = {
    "ends first": ([(1, "forward", -1, 5, 4)], "ends before it begins"),
    "before the machine started": ([(1, "forward", -1, -5, 4)], "or a time is impossible"),
    "phases overlap": ([(1, "forward", -1, 0, 10), (1, "backward", -1, 8, 20)], "two phases overlap"),
    "steps overlap": ([(1, STEP, -1, 0, 10), (2, STEP, -1, 8, 20)], "two steps overlap"),
    "step twice": ([(1, STEP, -1, 0, 10), (1, STEP, -1, 10, 20)], "a step appears twice"),
    "steps turned round": ([(2, STEP, -1, 0, 10), (1, STEP, -1, 10, 20)], "a step comes after a later one"),
    "no time": ([(1, STEP, -1, 10, 10)], "a step took no time"),
    "not by end": ([(1, "forward", -1, 10, 20), (1, "data", -1, 0, 10)], "written before an earlier one"),
    "before its step": ([(1, "forward", -1, 0, 10), (1, STEP, -1, 5, 20)], "overlaps the edge of its step"),
    "into a later step": ([(1, "eval", -1, 0, 10), (2, STEP, -1, 5, 20)], "overlaps the edge of its step"),
    "out of its step": ([(1, STEP, -1, 0, 10), (1, "eval", -1, 5, 20)], "overlaps the step before it"),
    "root of nobody": ([(1, "reduce", 1, 0, 10)], "a step, root or size is impossible"),
    "fewer than no bytes": ([(1, "reduce", 0, 0, 10, -1)], "a step, root or size is impossible"),
}


@pytest.mark.parametrize("case", SPANS_NO_TRACER_WRITES)
def test_spans_that_no_tracer_writes_are_damage(tmp_path, case):
    spans, text = SPANS_NO_TRACER_WRITES[case]
    with pytest.raises(RunError, match=f"rank-00000.trace is damaged: .*{text}"):
        read_run(write_run(tmp_path, [spans], [0], log=[]))


def test_counters_of_another_host_are_left_out(tmp_path):
    """A file that an earlier run on other hosts left: its bytes are not this run's."""
    run = write_run(tmp_path, three_ranks(3), [0, 0, 1], samples=[[(0, 0, 0), (9, 1, 1)], [(0, 0, 0), (9, 1, 1)]])
    assert [one.node for one in read_run(run).counters] == [0, 1]
    path = run / "traces" / "node-00001.counters"
    path.write_bytes(path.read_bytes().replace(b'"cn01"', b'"cn07"'))
    read = read_run(run)
    assert [one.node for one in read.counters] == [0]
    assert "node-00001.counters is damaged and left out: its header names node 1, cn07" in str(read.missing)


@pytest.mark.parametrize("nodes", [[0, 2], [1, 1], [1, 2]])
def test_nodes_with_gaps_are_damage(nodes):
    places = [{"rank": rank, "node": node, "host": "a"} for rank, node in enumerate(nodes)]
    with pytest.raises(ValueError, match="nodes are not numbered from 0 without gaps"):
        schemas.check_config({"settings": {"strategy": "ring"}, "ranks": places})


@pytest.mark.parametrize("code", ["97fa320", [], {"commit": 5}, {"dirty": "no"}, {"dirty": 0}, {"version": 1.5}])
def test_a_damaged_word_on_the_code(code):
    known = {"settings": {"strategy": "ring"}, "code": {"commit": None, "dirty": None, "version": "0.1.0"}}
    schemas.check_config(known)
    schemas.check_config(known | {"code": {"commit": "97fa320d42", "dirty": True}})
    schemas.check_config({"settings": {"strategy": "ring", "model": None}})
    with pytest.raises(ValueError, match="code"):
        schemas.check_config(known | {"code": code})


def test_a_name_twice_in_an_object_is_damage(tmp_path):
    """JSON's readers take the last one, and nobody hears of the other."""
    run = write_run(tmp_path, three_ranks(3), [0, 0, 1])
    config = run / "config.json"
    config.write_text(config.read_text().replace('"parameters"', '"parameters": 7, "parameters"', 1))
    with pytest.raises(RunError, match="a name appears twice in one object"):
        read_run(run)


def test_no_folder_and_an_empty_one(tmp_path):
    with pytest.raises(RunError, match="is not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match="not a run folder"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="no traces, so it is not a run folder; give the folder of --out"):
        read_run(tmp_path, allow_missing=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"holds no rank-.* train with --trace on"):
        read_run(tmp_path, allow_missing=True)
