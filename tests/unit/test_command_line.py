"""What a mistake on a command line is told, in one line; and every program's --help."""

import os
import runpy
import sys
from pathlib import Path

import pytest

from scripts import diagnose, export, plot, virtual_cluster, watch
from scripts.settings.command_line import ELSEWHERE, Parser
from scripts.settings.training import flags, parse_settings
from traces.read import schemas

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]


def mistake(capsys, parse, words) -> str:
    """The one line, after the exit code of a mistake."""
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batchsize", "4"], "--batchsize is not a flag: did you mean --batch-size?"),
        (["--grad_accum=4"], "--grad_accum=4 is not a flag: did you mean --grad-accum?"),
        (["-steps", "4"], "-steps is not a flag: did you mean --steps?"),
        (["\N{EN DASH}steps", "4"], "\N{EN DASH}steps is not a flag: did you mean --steps?"),
        (["--learning_rate", "1"], "--learning_rate is not a flag: did you mean --lr?"),
        (["--step", "4"], "--step is not a flag: did you mean --steps?"),
        (["--zzz"], "--zzz is not a flag (see"),
        (["-n", "4"], "-n is not a flag (see"),
        (["--" + 70 * "z"], "zz... is not a flag (see"),
        (["--train-data", "a.bin", "b.bin"], "'b.bin' was given where a flag is expected; a glob needs quotes (see"),
        (["--model", "gpt3"], "argument --model: invalid choice: 'gpt3'"),
        (["--strategy", "a folder/my own.py"], "'a folder/my own.py', expected a name without spaces or $, or"),
    ],
)
def test_a_misspelt_flag(words, message, capsys):
    assert message in mistake(capsys, lambda words: parse_settings("", words), words)


def test_a_strategy_of_one_s_own_may_lie_in_any_folder():
    given = parse_settings("", ["--strategy", f"/{'a folder' * 40}/own.py"]).strategy
    assert given == f"/{'a folder' * 40}/own.py"
    assert schemas.STRATEGY.accepts(given), "else no other program reads the run"


def test_what_others_call_flags_leads_to_ours():
    ours = {item.name.replace("_", "-") for item in flags()}
    assert {*ELSEWHERE.values()} <= ours
    assert not ours & ELSEWHERE.keys()


def test_nothing_is_called_by_a_name_that_a_program_lacks(capsys):
    parser = Parser("what it does", prog="it")
    parser.add_argument("--out")
    said = mistake(capsys, parser.parse_args, ["--learning-rate", "1"])
    assert said == "it: error: --learning-rate is not a flag (see it --help)\n"


def test_a_flag_that_is_missing_may_be_misspelt(capsys):
    said = mistake(capsys, export.parse, ["run", "--fromat", "llmc", "--out", "a"])
    assert "--fromat is not a flag: did you mean --format?" in said
    assert "--format, --out are missing (see" in mistake(capsys, export.parse, ["run"])
    said = mistake(capsys, watch.parse, ["--evry", "3"])
    assert "--evry is not a flag: did you mean --every?" in said


def test_one_process_of_a_job_speaks(capsys, monkeypatch):
    monkeypatch.setattr("scripts.settings.command_line.SPEAKING_S", 0.0)
    parser = Parser("what it does", prog="it")
    for rank, words, code in (("0", ["--help"], 0), ("1", ["--help"], 0), ("0", ["--a"], 2), ("1", ["--a"], 2)):
        monkeypatch.setenv("PMI_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(words)
        assert (ended.value.code or 0) == code
        said = capsys.readouterr()
        assert bool(said.out + said.err) == (rank == "0")


def test_a_subcommand_knows_its_flags(capsys):
    parse = virtual_cluster.parser().parse_args
    needed = ["run", "--nodes", "1", "--rate", "1gbit", "--ranks", "1"]
    assert "--burts is not a flag: did you mean --burst?" in mistake(capsys, parse, [*needed, "--burts", "1"])
    said = mistake(capsys, parse, [*needed, "python"])
    assert "'python' was given where a flag is expected; a command comes after --" in said


def test_where_a_run_is_missing_the_newest_one_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for program in (plot, diagnose):
        assert "RUN is missing, expected a run folder (see" in mistake(capsys, program.parse, [])
    for age, name in enumerate(("new", "old")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
        os.utime(tmp_path / "runs" / name / "config.json", (1e9 - age, 1e9 - age))
        os.utime(tmp_path / "runs" / name, (1e9 - age, 1e9 - age))
    assert "expected a run folder, such as runs/new, the newest here (see" in mistake(capsys, plot.parse, [])


ROOMS = ("scripts", "tests/suites", "tests/fixtures", "tests/gpu/on_device")
FILES = [path.relative_to(ROOT) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
PROGRAMS = [str(path) for path in FILES if "\nif __name__ ==" in (ROOT / path).read_text()]


@pytest.mark.parametrize("path", PROGRAMS)
def test_every_program_answers_help(path, monkeypatch, capsys, tmp_path):
    """Also without what it needs: PyTorch, arguments, a rank beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for package in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    assert not ended.value.code
    name = "gpt2-mpi" if path == "scripts/__main__.py" else Path(path).name
    assert name in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
