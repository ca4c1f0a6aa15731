"""What an earlier version wrote is still read: run folders, checkpoints to go on from, and its command lines."""

import hashlib
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from strategies import STRATEGIES
from tests.support.in_process import log, train

WRITTEN = Path(__file__).parents[1] / "fixtures" / "written_by_8b46250"
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
FOLDERS = (
    SCRIPTS,
    SCRIPTS / "makers",
    ROOT / "tests" / "suites",
    ROOT / "tests" / "gpu" / "on_device",
)  # where programs lie now

NAMED_NOW, NEW = {"sliced": "sliced-in-turn"}, {"sliced"}
RUNS = sorted(path.name for path in (WRITTEN / "runs").iterdir())
CHECKPOINTS = {path.parent.name: json.loads(path.read_text()) for path in WRITTEN.glob("checkpoints/*/command.json")}
ON_ONE_NODE = sorted(name for name, command in CHECKPOINTS.items() if command["nodes"] == 1)
NODE_SHARDED = "node-sharded"
SAME = {"loss": 1e-6, "grad_norm": 1e-6}  # to rounding, relative
HELP = sorted(path.stem for path in (WRITTEN / "help").iterdir())

any_mpi = pytest.mark.any_mpi


@pytest.fixture
def program(monkeypatch, capsys):
    """program("plot.py", RUN): what the program prints, run in this process as by its command line."""

    def run(name, *arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [f"scripts/{name}", *map(str, arguments)])
        code = None
        try:
            path = next(folder / name for folder in FOLDERS if (folder / name).exists())
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        assert not code, f"{name} {arguments} ends with {code}: {printed.err}"
        return printed.out

    return run


# --- run folders ---


@any_mpi
@pytest.mark.parametrize("name", RUNS)
def test_its_runs_are_drawn_and_exported(name, program, tmp_path):
    run = shutil.copytree(WRITTEN / "runs" / name, tmp_path / name)
    printed = program("plot.py", run)
    pictures = {path.stem for path in (run / "plots").glob("*.svg")}
    assert {"timeline", "phases", "ranks", "waits", "messages", "loss"} <= pictures
    assert (run / "report.html").stat().st_size
    assert json.loads((run / "config.json").read_text())["settings"]["strategy"] in printed
    for form, suffix in (("perfetto", "json"), ("paraver", "prv")):
        out = tmp_path / f"out.{suffix}"
        assert str(out) in program("export.py", run, "--format", form, "--out", out)
        assert out.stat().st_size


@any_mpi
@pytest.mark.parametrize("name", RUNS)
def test_it_is_said_of_its_runs_what_was_said(name, program):
    run, said = WRITTEN / "runs" / name, WRITTEN / "expected" / name
    expected = json.loads((said / "diagnose.json").read_text())
    found = json.loads(program("diagnose.py", run, "--json"))
    # A step was taken from its first start to its last end, so that exchanges could be longer than what they are in.
    assert 0.75 < found["bottleneck"]["share"] / expected["bottleneck"].pop("share") < 1 + 1e-9
    assert found["evidence"]["exchange_s"] <= found["evidence"]["step_s"]
    assert_still_says(found["bottleneck"], expected["bottleneck"], "bottleneck")
    assert found["evidence"]["step_s"] == pytest.approx(expected["evidence"]["step_s"], rel=1e-9)
    named_now = {row["strategy"]: NAMED_NOW.get(row["strategy"], row["strategy"]) for row in expected["advice"]}
    assert {row["strategy"] for row in found["advice"]} - NEW == {*named_now.values()}
    factor = found["evidence"]["model"]["factor"] or 1.0  # by which what the model says is calibrated since
    expected = json.loads((said / "advise.json").read_text())
    found = json.loads(program("advise.py", "--from-run", run, "--json"))
    rows, expected = ({row["strategy"]: row for row in report["strategies"]} for report in (found, expected))
    expected = {NAMED_NOW.get(strategy, strategy): row for strategy, row in expected.items()}
    assert rows.keys() - NEW == expected.keys()
    if (
        "bfloat16" in name
    ):  # MPI's own calls sent float32 whatever --wire, and half the bytes of such calls were expected
        expected = {name: row for name, row in expected.items() if name in STRATEGIES and STRATEGIES[name].overlaps}
    for strategy, row in expected.items():
        row["strategy"] = strategy
        model = {key: value for key, value in row.items() if key not in ("step_s", "step_overlapped_s")}
        model["exchange_s"] = row["exchange_s"] and factor * row["exchange_s"]
        assert_still_says(rows[strategy], model, strategy)


def assert_still_says(found, expected, where):
    """All that is expected is there, numbers to rounding; there may be more."""
    if isinstance(expected, dict):
        assert expected.keys() <= found.keys(), where
        for key, value in expected.items():
            assert_still_says(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_still_says(one, other, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=0), where
    else:
        assert found == expected, where


# --- checkpoints ---


@any_mpi
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_its_parameters_are_read(name, program, tmp_path):
    program("export.py", WRITTEN / "checkpoints" / name, "--format", "llmc", "--out", tmp_path / "model.bin")
    assert hashlib.sha256((tmp_path / "model.bin").read_bytes()).hexdigest() == CHECKPOINTS[name]["model_sha256"]


@pytest.fixture
def resume(comm, shared_path, monkeypatch):
    """resume(name, world): the log of a copy of the run when the ranks of this world have ended it."""

    def run(name, world):
        command = CHECKPOINTS[name]
        if comm.rank == 0:
            shutil.copytree(WRITTEN / "checkpoints" / name, shared_path / "run")
            shutil.copy(WRITTEN / "text.txt", shared_path)
        comm.Barrier()
        monkeypatch.chdir(shared_path)
        workers = world.size - ("dedicated" in command["flags"])
        batch = ["--batch-size", command["global_batch"] // workers]
        train(world, "run", *command["always"], *command["flags"], *batch, "--resume")
        earlier = json.loads((shared_path / "run" / "config.json").read_text())["earlier"]
        assert [one["ranks"] for one in earlier] == [command["ranks"]]
        return log(shared_path / "run")

    return run


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ON_ONE_NODE)
def test_as_many_ranks_go_on(name, comm, resume):
    from dist.world import start_world

    assert_goes_on(resume(name, start_world()), name, SAME)


@pytest.mark.ranks(4)
def test_as_many_nodes_go_on(comm, resume):
    """Where its state is cut by nodes and holds rounding errors."""
    from dist.world import world_of

    world = world_of(comm, comm.Split(comm.rank % CHECKPOINTS[NODE_SHARDED]["nodes"], comm.rank))
    assert_goes_on(resume(NODE_SHARDED, world), NODE_SHARDED, SAME)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_fewer_ranks_go_on(name, comm, resume):
    """Those of one node send no bfloat16, so the curve of two nodes is met less closely."""
    from dist.world import start_world

    rels = {"loss": 1e-3, "grad_norm": 1e-2} if name == NODE_SHARDED else SAME
    assert_goes_on(resume(name, start_world()), name, rels)


def assert_goes_on(lines, name, rels):
    """The checkpoint's steps as they were, and then the curve of the run that had not been killed."""
    expected = log_lines(WRITTEN / "checkpoints" / name / "expected.jsonl")
    kept = int(next((WRITTEN / "checkpoints" / name / "checkpoints").iterdir()).name.removeprefix("step-"))
    assert lines[:kept] == expected[:kept]
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for key, rel in rels.items():
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in expected], rel=rel, abs=0), key
    assert lines[-1]["tokens"] == expected[-1]["tokens"]


def log_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- command lines ---


@any_mpi
@pytest.mark.parametrize("name", HELP)
def test_no_flag_is_lost(name, program, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    script, _, verb = name.partition("-")
    old = flags((WRITTEN / "help" / f"{name}.txt").read_text())
    new = flags(program(f"{script}.py", *([verb] if verb else []), "--help"))
    assert "--help" in old
    assert old <= new, f"{name}: {old - new}"


def flags(text: str) -> set[str]:
    """Those that a help text lists, not those of its prose."""
    listed = [re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines() if re.match(r" +-", line)]
    return {flag for line in listed for flag in re.findall(r"--[a-z][a-z0-9-]*", line)}
