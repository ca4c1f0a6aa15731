"""The tests' own checkers of exports, chrome_check and paraver_check: each finds what is broken, by name."""

import json

import pytest

from tests.support import chrome_check, paraver_check
from tests.support.make_run import three_ranks, with_counters, write_run
from traces import read_run
from traces.export import chrome, paraver
from traces.record.phases import INDEX


def edit(path, old, new, count=1):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


BROKEN_PARAVER = {
    "no header": (("prv", "#Paraver", "#Parrot"), "header"),
    "a task less": (("prv", ":1:3(1:1,1:1,1:2)", ":1:4(1:1,1:1,1:2)"), "tasks"),
    "CPUs": (("prv", ":2(2,1):", ":2(2,2):"), "one CPU a rank"),
    "communicator": (("prv", "c:1:1:3:1:2:3", "c:1:1:3:1:2:4"), "communicator"),
    "CPU of another node": (("prv", "\n1:3:1:3:1:", "\n1:1:1:3:1:"), "another node"),
    "beyond the end": (("prv", "_ns", "_ns".replace("_", "0_")), "to the end"),
    "states overlap": (("prv", "1:1:1:1:1:0:10000000:1", "1:1:1:1:1:0:11000000:1"), "overlap"),
    "no length": (("prv", "1:1:1:1:1:0:10000000:1", "1:1:1:1:1:0:0:1"), "without length"),
    "no entry": (("prv", f"90000001:{1 + INDEX['update']}", "90000001:0"), "twice"),
    "step not closed": (("prv", "184000000:90000002:0", "184000000:90000020:0", 3), "not closed"),
    "another call": (("prv", "50000002:9:", "50000002:7:"), "another one"),
    "two roots": (("prv", "50100004:1:90000001", "50100004:1:50100003:1:90000001"), "roots"),
    "negative": (("prv", "90000020:16000000", "90000020:-1"), "not a record"),
    "state without a name": (("pcf", "13    Group Communication\n", ""), "differ"),
    "type without a name": (("pcf", "6    90000020    W", "6    90000021    W"), "has no name"),
    "rows": (("row", "LEVEL CPU SIZE 3", "LEVEL CPU SIZE 2"), "first line"),
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


def change(**values):
    return lambda event: event | values


BROKEN_CHROME = {
    "pid 0": ("reduce", change(pid=0), "pid"),
    "kind": ("reduce", change(ph="B"), "another kind"),
    "back in time": ("bcast", change(ts=1.0), "time"),
    "no length": ("reduce", change(dur=0), "length"),
    "overlap": ("forward", change(dur=40000.5), "overlaps"),
    "out of the step": ("bcast", change(dur=90000), "overlaps"),
    "a phase in a phase": ("transfer", change(name="forward"), "inside reduce"),
    "words counted": ("ports MB/s", change(args={"in": "1"}), "not numbers"),
    "a rank without a name": ("thread_name", change(tid=9), "has no name"),
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
