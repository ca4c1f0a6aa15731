"""--checkpoint-minutes, --minutes and --tokens: what ends a run or asks for a checkpoint besides steps and signals."""

import itertools
import time
from types import SimpleNamespace

import pytest

from dist.world import start_world
from gpt2.formats.checkpoints import newest_first
from scripts.training import plan, signals
from tests.support.in_process import log, train

SMALL = [
    "--n-layer", 1, "--n-head", 1, "--n-embd", 8, "--context", 8, "--batch-size", 1, "--threads", 1, "--eval-every", 0,
    "--trace", "off", "--strategy", "reduce-scatter",
]  # fmt: skip


def checkpoints(run) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in newest_first(run / "checkpoints")]


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by a tenth of a second each time it is looked at, twice a step."""
    tenths = itertools.count()
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(tenths) / 10))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("ticking")
def test_minutes_end_a_run_with_a_checkpoint_and_it_goes_on(comm, shared_path, capsys):
    world, run = start_world(), shared_path / "run"
    flags = [*SMALL, "--lr", 1e-2, "--lr-steps", 50, "--minutes", 0.02]
    train(world, run, "--steps", 10**6, *flags, code=0)
    last = log(run)[-1]["step"]
    assert 1 < last < 10**6
    assert checkpoints(run) == [last]
    assert (run / "summary.json").exists()
    if world.rank == 0:
        printed = capsys.readouterr().out
        assert f"--minutes ended the run after step {last}: continue it with --out {run} --resume" in printed
    train(world, run, "--steps", last + 3, *flags[:-2], "--resume", code=0)
    assert [line["step"] for line in log(run)] == [*range(1, last + 4)]


@pytest.mark.ranks(2)
def test_minutes_count_while_a_text_is_tokenized(comm, shared_path, monkeypatch):
    def slowly(*arguments):
        time.sleep(0.6)
        return open_data(*arguments)

    open_data = plan.open_data
    monkeypatch.setattr(plan, "open_data", slowly)
    run = shared_path / "run"
    train(start_world(), run, *SMALL, "--steps", 10**6, "--minutes", 0.5 / 60, code=0)
    assert [line["step"] for line in log(run)] == [1], "it may end once there is a step to keep"


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("ticking")
def test_checkpoints_by_time_beside_those_by_steps(comm, shared_path):
    world, run = start_world(), shared_path / "run"
    train(world, run, *SMALL, "--steps", 10**6, "--minutes", 0.03, "--checkpoint-minutes", 0.004, "--keep", 99, code=0)
    found = checkpoints(run)
    assert 3 <= len(found) <= 1 + 0.03 / 0.004 + 1, "a clock that is never reset asks at each step"


@pytest.mark.ranks(2)
def test_tokens_settle_the_steps(comm, shared_path):
    run = shared_path / "run"
    train(start_world(), run, *SMALL, "--tokens", 100, code=0)
    assert [line["tokens"] for line in log(run)] == [16 * step for step in range(1, 8)]
