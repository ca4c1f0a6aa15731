"""A run that was taken up again: each start has its own traces, settings, lines of the log, and verdict."""

import json
import re
import shutil

import pytest

from scripts import diagnose, export, plot
from scripts.reports import verdict
from scripts.training.folder import RunFolder
from tests.support import faulty_runs
from traces import RunError, read_run

pytestmark = pytest.mark.any_mpi
# Of each start: after which step it goes on, and what is wrong. The second one came to no checkpoint.
STARTS = ((None, {"slow": {5: 1.6}}), (30, {"data_ms": {2: 90.0}}), (30, {"ports": {(3, "in"): 10e6}}), (60, {}))
KINDS = {1: "straggler", 2: "data", 3: "slow-link"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each start makes 40 steps, as a job that trains into the folder would leave them."""
    path = tmp_path_factory.mktemp("starts") / "run"
    path.mkdir()
    for resumed, fault in STARTS:
        folder = RunFolder(path, lambda: None, resumed)
        folder.set_config({}, [], "", {"code": {}})
        folder.begin()
        before = (path / "log.jsonl").read_bytes()
        faulty_runs.make(path, first=(resumed or 0) + 1, steps=40, **fault)
        (path / "log.jsonl").write_bytes(before + (path / "log.jsonl").read_bytes())
        config = json.loads((path / "config.json").read_text())
        facts = {name: config[name] for name in ("links", "parameters")} | {"resumed_step": resumed}
        facts |= {name: config[name] for name in ("settings", "ranks", "mpi_library")}
        folder.add_to_config(**facts)
    return path


@pytest.fixture
def run(tmp_path, made):
    return shutil.copytree(made, tmp_path / "run")


def test_each_start_has_its_verdict(made):
    found = {number: verdict.diagnose(read_run(made, start=number)) for number in (1, 2, 3, 4)}
    assert {number: found[number]["bottleneck"]["kind"] for number in KINDS} == KINDS
    assert [found[number]["bottleneck"]["rank"] for number in (1, 2)] == [5, 2]
    assert (found[3]["bottleneck"]["node"], found[3]["bottleneck"]["direction"]) == (3, "in")
    assert found[4] == verdict.diagnose(read_run(made)), "the last one"
    assert [one["evidence"]["start"] for one in found.values()] == [1, 2, 3, 4]
    for answer in found.values():
        rows = answer["evidence"]["starts"]
        assert [(row["start"], row["first"], row["last"]) for row in rows] == [(1, 1, 30), (3, 31, 60), (4, 61, 100)]
        assert [row["kind"] for row in rows[:2]] == ["straggler", "slow-link"]
        assert rows[1]["headline"] == "the port of cn03 is slow in, and every exchange waits for it"


def test_a_start_has_its_own_steps_alone(made):
    run = read_run(made, start=1)
    assert [row["step"] for row in run.log] == list(range(1, 31)), "later ones were made by the third start"
    assert run.ranks[0].records["step"].max() == 40
    assert read_run(made, start=2).log == []
    assert verdict.diagnose(read_run(made, start=2))["evidence"]["tokens_per_s"] is None


def test_what_is_printed(made, capsys):
    assert diagnose.main([str(made), "--start", "3"]) == 0
    said = capsys.readouterr().out
    assert "cn03's port carries 10" in said
    lines = said[said.index("starts ") :].splitlines()
    assert lines[0] == "starts      3; the lines above describe start 3; --start K selects another"
    assert lines[1].startswith("            1: steps 1 to 30 on 9 ranks, ")
    assert " a step: rank 5 on cn03 computes " in lines[1]
    assert lines[2].endswith("the port of cn03 is slow in, and every exchange waits for it")
    assert diagnose.main([str(made), "--start", "2"]) == 0
    assert "describe start 2" in capsys.readouterr().out


def test_a_start_that_is_not_there(run, capsys):
    for number in (0, 5, -1):
        with pytest.raises(RunError, match=f"has no start {number}: expected 1 to 4, the last"):
            read_run(run, start=number)
    shutil.rmtree(run / "earlier-traces" / "to-step-00000030")
    with pytest.raises(RunError, match="has no traces of start 1 with their config"):
        read_run(run, start=1)
    (run / "earlier-traces" / "to-step-00000060" / "config.json").write_text("{")
    assert read_run(run, start=2).ranks[0].records["step"].max() == 70
    assert diagnose.main([str(run)]) == 0
    assert capsys.readouterr().out.count("no usable traces") == 2
    assert diagnose.main([str(run), "--start", "3"]) == 2
    assert capsys.readouterr().err.startswith("diagnose.py: error: ")


def test_the_traces_of_a_start_are_exported(made, tmp_path):
    for start, last in ((None, 100), (2, 70)):
        out = tmp_path / f"{start}.json"
        asked = [] if start is None else ["--start", str(start)]
        assert export.main([str(made), "--format", "perfetto", "--out", str(out), *asked]) == 0
        assert max(map(int, re.findall(r"step (\d+)", out.read_text()))) == last
    with pytest.raises(SystemExit):
        export.main([str(made), "--format", "llmc", "--out", str(tmp_path / "model"), "--start", "2"])


def test_a_start_that_was_not_traced_names_one_that_was(run, capsys):
    shutil.rmtree(run / "traces")
    (run / "traces").mkdir()
    for program in (diagnose.main, plot.main, lambda words: export.main([*words, "--format", "paraver", "--out", "x"])):
        assert program([str(run)]) == 2
        assert "an earlier start left some: --start 3 of diagnose.py" in capsys.readouterr().err


def test_an_export_says_what_is_missing(run, tmp_path, capsys):
    (run / "traces" / "rank-00002.trace").unlink()
    assert export.main([str(run), "--format", "perfetto", "--out", str(tmp_path / "out.json")]) == 0
    assert "lacks 1 of 9 ranks' files (rank-00002.trace)" in capsys.readouterr().err


def test_traces_of_another_run_are_nobodys(run):
    """As of a folder that was copied in by hand."""
    config = run / "earlier-traces" / "to-step-00000030" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"started": "2020-01-01T00:00:00+0000"}))
    with pytest.raises(RunError, match="it has starts: 2, 3"):
        read_run(run, start=1)


def test_of_many_starts_the_last_ones_are_judged_by_the_ends_of_their_traces(made, monkeypatch):
    read, asked = verdict.read_run, []

    def noted(path, **options):
        asked.append((options["start"], options["most_bytes"]))
        return read(path, **options)

    monkeypatch.setattr(verdict, "read_run", noted)
    monkeypatch.setattr(verdict, "STARTS_SHOWN", 2)
    monkeypatch.setattr(verdict, "ALL_TRACES_BYTES", 18 * 40_000)
    answer = verdict.diagnose(read(made))
    assert asked == [(3, 40_000)]
    assert [row["kind"] for row in answer["evidence"]["starts"][:2]] == [None, "slow-link"]
    assert "starts      the last 2 of 3; the lines above describe start 4" in verdict.as_text(answer)


def test_pictures_of_a_start_are_of_its_steps_and_lie_apart(made, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "plot", lambda measured, folder, page: drawn.append((measured, folder, page)) or [])
    assert plot.main([str(made), "--start", "3"]) == 0
    (((one,), folder, page),) = drawn
    assert [row["step"] for row in one.run.log] == list(range(31, 61))
    assert (folder, page) == (made / "plots" / "start-3", made / "plots" / "start-3" / "report.html")
    settings = plot.parse(["RUN", "--start", "2"])
    assert str(settings.out) == "RUN/plots/start-2"
    assert str(plot.parse(["RUN", "--start", "2", "--out", "DIR"]).out) == "DIR"
    with pytest.raises(SystemExit):
        plot.parse(["RUN", "RUN", "--start", "2"])
