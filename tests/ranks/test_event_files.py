"""TensorBoard's event files, live and of a finished run, read back by TensorBoard's own reader."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dist.world import start_world
from scripts.export import main as export
from scripts.settings.training import parse_settings
from tests.support.in_process import ROOT, alone, log
from tests.support.in_process import train as train_here
from traces.read.schemas import LOG_ROW
from traces.record.files import RUN_FORMAT

SMALL = ["--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--context", 16, "--trace", "off"]


@pytest.fixture
def needs_tensorboard():
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install -e '.[tensorboard]'")


def points(folder: Path) -> dict[str, list[tuple]]:
    """(step, value) of each scalar of a folder's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def expected(rows: list[dict]) -> dict[str, list[tuple]]:
    """The same of a log."""
    names = {name for row in rows for name in row} - {"step"}
    return {name: [(row["step"], float(np.float32(row[name]))) for row in rows if name in row] for name in names}


@pytest.mark.usefixtures("needs_tensorboard")
@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_a_run_and_its_going_on(comm, shared_path):
    """Also where the first run has come further than the checkpoint that the second goes on from."""
    world, run = start_world(), shared_path / "run"
    flags = [*SMALL, "--checkpoint-every", 3, "--eval-every", 4, "--skip-outliers", 6, "--tensorboard"]
    train_here(world, run, *flags, "--steps", 8)
    if comm.rank == 0:
        assert points(run / "tensorboard") == expected(log(run))
        assert {name for row in log(run) for name in row} <= {"step", *LOG_ROW}
        for step in (6, 8):
            shutil.rmtree(run / "checkpoints" / f"step-{step:08}", ignore_errors=step == 6)
    comm.Barrier()
    train_here(world, run, *flags, "--steps", 7, "--resume")
    if comm.rank == 0:
        assert len(list((run / "tensorboard").iterdir())) == 2
        found = points(run / "tensorboard")
        assert found == expected(log(run))
        assert [step for step, _ in found["loss"]] == [1, 2, 3, 4, 5, 6, 7]
        assert [step for step, _ in found["val_loss"]] == [4, 7]
    comm.Barrier()


def write_run(folder: Path, rows: list[dict], **config) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"format": RUN_FORMAT, "settings": {"strategy": "ring"}} | config))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ROWS = [{"step": step, "loss": 5 / step, "step_s": 0.5, "tokens": 10**9 * step} for step in range(1, 7)]
ROWS[3] |= {"val_loss": float("nan"), "skipped": True, "slowest_rank": 3, "a name of its own": "text"}


@pytest.mark.usefixtures("needs_tensorboard")
def test_a_finished_run_is_converted(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = write_run(tmp_path / "run", ROWS, started="2026-11-21T10:00:00+0000", resumed_step=2)
    out = tmp_path / "board" / "run"
    assert export([str(run), "--format", "tensorboard", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{next(out.iterdir())}\n"
    found = points(out)
    nan_step, nan = found.pop("val_loss")[0]
    assert nan_step == 4
    assert np.isnan(nan)
    rows = [{name: value for name, value in row.items() if name in ("step", *LOG_ROW)} for row in ROWS]
    assert found | {"val_loss": []} == expected(rows) | {"val_loss": []}
    times = [event.wall_time for event in EventAccumulator(str(out)).Reload().Scalars("loss")]
    ten_o_clock = 1795255200
    assert times == [ten_o_clock + seconds for seconds in (-0.5, 0, 0.5, 1, 1.5, 2)]

    assert export([str(run), "--format", "tensorboard", "--out", str(out)]) == 2
    assert "holds event files already" in capsys.readouterr().err
    (run / "log.jsonl").write_text('{"step": "1"}\n')
    assert export([str(run), "--format", "tensorboard", "--out", str(tmp_path / "other")]) == 2
    assert "log.jsonl, line 1" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "whole", ROWS)
    assert export([str(tmp_path / "whole"), "--format", "tensorboard", "--out", str(tmp_path / "file" / "x")]) == 2
    assert capsys.readouterr().err.startswith(f"export.py: error: {tmp_path / 'file' / 'x'}")


@pytest.mark.any_mpi
@pytest.mark.ranks(1)
def test_without_the_package(comm, tmp_path, monkeypatch, capsys):
    """One line before anything starts, that says how to get it."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run = write_run(tmp_path / "run", ROWS)
    assert export([str(run), "--format", "tensorboard", "--out", str(tmp_path / "board")]) == 2
    line = "needs the package tensorboard, which is not installed: pip install -e '.[tensorboard]'\n"
    assert capsys.readouterr().err == f"export.py: error: --format tensorboard {line}"
    assert not (tmp_path / "board").exists()
    with pytest.raises(SystemExit) as ended:
        train_here(alone(), tmp_path / "other", *SMALL, "--tensorboard")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: --tensorboard {line}"
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("needs_tensorboard")
def test_a_run_without_it_does_not_import_it():
    names = "from scripts import train, export; print('tensorboard' in sys.modules)"
    command = [sys.executable, "-c", f"import sys; {names}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "False\n", result.stderr
    assert parse_settings("", []).tensorboard is False
