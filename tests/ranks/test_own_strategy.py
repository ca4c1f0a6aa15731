"""The strategy in docs/own-strategy.md is one: it passes what the others pass, from a file elsewhere too."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dist.cost.model import TCP_HEADERS
from dist.world import start_world, world_of
from scripts import advise, bench_exchange, diagnose, plot
from strategies import STRATEGIES, find
from tests.ranks import test_strategies as small
from tests.support.in_process import answer, log, train
from tests.support.launch import launch
from tests.support.refusal import refusal_of_all

ROOT = Path(__file__).parents[2]
CODE, MESSAGES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-strategy.md").read_text(), re.DOTALL)
SHAPE = ["--n-layer", 1, "--n-head", 1, "--n-embd", 16, "--context", 16, "--batch-size", 1, "--steps", 3]


def write_strategy(path: Path, messages: str = "") -> Path:
    """The page's, in a file of its own."""
    path.parent.mkdir(exist_ok=True)
    code = CODE
    if messages:
        code = code.replace("class Chain", f"from dist.cost.stages import stage\n\n\n{messages}\n\nclass Chain")
        code = code.replace("Traits(", "Traits(messages=messages, ")
    path.write_text(code)
    return path


@pytest.mark.ranks(1, 2, 4)
def test_the_pages_strategy_is_one_serial_rank(comm, monkeypatch, tmp_path):
    assert len(CODE.splitlines()) <= 49
    chain = find(str(write_strategy(tmp_path / "chain.py")))
    monkeypatch.setitem(STRATEGIES, chain.name, chain)
    world, (expected, losses, norms) = world_of(comm, comm.Split(comm.rank // 2, comm.rank)), small.serial()
    first, *numbers, _ = small.distributed(world, "chain")
    again, *_ = small.distributed(world, "chain")
    np.testing.assert_array_equal(again, first)
    np.testing.assert_allclose(first, expected, atol=1e-5)
    np.testing.assert_allclose(numbers, (losses, norms), rtol=1e-4)
    assert len(set(comm.allgather(first.tobytes()))) == 1


@pytest.mark.any_mpi
@pytest.mark.parametrize("messages", ["", MESSAGES], ids=["without messages", "with messages"])
def test_every_program_takes_a_file_that_nobody_knows(tmp_path, messages):
    """Whatever its folder is called."""
    own, run = write_strategy(tmp_path / "my $trategies" / "chain.py", messages), tmp_path / "run"
    command = [sys.executable, ROOT / "scripts" / "train.py", "--strategy", own, *SHAPE, "--out", run]
    trained = launch(2, [str(word) for word in command])
    assert trained.returncode == 0, trained.stderr
    assert [line["step"] for line in log(run)] == [1, 2, 3]
    assert "chain" in answer(plot, run)
    assert (run / "plots" / "messages.svg").exists() == bool(messages)
    assert json.loads(answer(diagnose, run, "--json"))["bottleneck"]
    cluster = ["--nodes", 3, "--ranks", 3, "--link", "1gbit", "--latency", "50us"]
    rows = json.loads(answer(advise, "--from-run", run, *cluster, "--json"))["strategies"]
    (row,) = [row for row in rows if row["strategy"] == "chain"]
    assert row["memory_formula"] == "1 + 2 + 2"
    if messages:  # up the chain and down again: 4 vectors one after the other, of which the middle port takes two in
        vector_s = row["bytes_in"] / 2 / 125e6
        assert row["exchange_s"] == pytest.approx(4 * (vector_s * TCP_HEADERS + 50e-6), rel=0.02)
    else:
        assert row["exchange_s"] is None
        assert row["unknown"] == "chain declares no messages"


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_auto_and_the_benchmark_try_it(comm, shared_path, monkeypatch, capsys):
    """For auto it is one more candidate, whether the model knows it or not."""
    for messages in ("", MESSAGES):
        own = shared_path / f"chain{len(messages)}.py"
        if comm.rank == 0:
            write_strategy(own, messages)
        comm.Barrier()
        capsys.readouterr()
        train(start_world(), shared_path / own.stem, "--strategy", f"auto:{own}", *SHAPE)
        lines = capsys.readouterr().out.splitlines()
        if comm.rank == 0:
            said = next(line for line in lines if line.startswith("--strategy auto chose "))
            assert bool(messages) or f"and {own} (" in said.partition(", corrected by a trial of ")[2]
            assert str(own) in said
    flags = ["--strategies", f"{own},ring", "--bytes", "1MB", "--repeat", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_exchange.py", *flags])
    bench_exchange.main()
    assert comm.rank or re.search(r"^chain +[\d.]+", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file"),
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError"),
        ("from strategies.ring import Ring", "defines 0 subclasses of Strategy"),
    ],
)
def test_a_file_that_holds_none(comm, shared_path, capsys, text, says):
    path = shared_path / "own.py"
    if comm.rank == 0 and text is not None:
        path.write_text(text)
    comm.Barrier()
    assert says in refusal_of_all(comm, capsys, train, start_world(), shared_path / "run", "--strategy", path, *SHAPE)
