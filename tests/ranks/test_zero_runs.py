"""zero-2 and zero-3 in runs of scripts/train.py: checkpoints, what is traced."""

import json

import numpy as np
import pytest

from dist.world import start_world
from gpt2.config import GPT2Config
from gpt2.data.shards import write_shard
from gpt2.formats import weights
from gpt2.parameters import Layout
from tests.support.in_process import log
from tests.support.in_process import train as train_here
from tests.support.refusal import refusal_of_all
from traces import read_run
from traces.record.phases import EXCHANGE, INDEX

FLAGS = ["--n-layer", "3", "--n-head", "2", "--n-embd", "16", "--context", "16", "--lr", "1e-2", "--warmup", "2"]
FLAGS += ["--vocab-size", "100"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("tokens"), np.random.default_rng(1)
    for name, count in (("train", 5001), ("val", 16 * 7 + 1)):  # seven windows to validate on
        write_shard(folder / f"{name}.bin", np.sort(random.integers(100, size=count)).astype(np.uint16))
    return ["--train-data", str(folder / "train.bin"), "--val-data", str(folder / "val.bin"), "--eval-steps", "0"]


@pytest.mark.ranks(3)
def test_a_run_goes_on_from_a_checkpoint(comm, shared_path, tokens):
    flags = [*FLAGS, *tokens, "--strategy", "zero-3", "--eval-every", 1, "--batch-size", 2]
    first, again = shared_path / "first", shared_path / "again"
    train_here(start_world(), first, *flags, "--steps", 2)
    train_here(start_world(), again, *flags, "--init", first, "--steps", 1, "--lr", 0)
    assert log(again)[0]["val_loss"] == pytest.approx(log(first)[-1]["val_loss"], rel=1e-6)
    assert (weights.load(again).flat == weights.load(first).flat).all()


def assert_rows_are_counted(ranks, of_ranks):
    """In the first step, whose rows config.json has, each rank hands over all gradients, and rows of 16 numbers with
    their ids."""
    first = [trace.records[trace.records["step"] == 1] for trace in ranks]
    sums = [records["bytes"][records["phase"] == INDEX["reduce_scatter"]].max() for records in first]
    (vector,) = {int(size) - rows * (4 * 16 + 4) for size, rows in zip(sums, of_ranks, strict=True)}
    count = Layout(GPT2Config(n_layer=3, n_head=2, n_embd=16, context=16, vocab_size=100)).count
    assert 4 * count <= vector < 4.1 * count  # padded


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("flags", "reduce_scatters", "all_gathers"),
    [
        (["--strategy", "zero-3"], 5, 5 + 1),  # of three layers; forward; backward finds two of them
        (["--strategy", "zero-2", "--overlap"], 5, 1 + 5),  # begun after the update, waited for in forward
        (["--strategy", "hierarchical-sharded", "--overlap"], 1, 3),  # rows and embeddings, layers, head
        (["--strategy", "hierarchical-sharded", "--overlap", "--split-embedding", "off"], 1, 1 + 1),  # one bucket
    ],
)
def test_exchanges_inside_forward_and_backward_are_traced(
    comm, shared_path, tokens, flags, reduce_scatters, all_gathers
):
    """They interrupt the phases, so that nothing counts twice; all ranks make the same calls."""
    run = shared_path / "run"
    train_here(start_world(), run, *FLAGS, *tokens, *flags, "--steps", 2, "--eval-every", 0, "--batch-size", 2)
    ranks = read_run(run).ranks
    calls = []
    for trace in ranks:
        records = trace.records[trace.records["step"] == 2]
        phases = np.sort(records[records["phase"] != INDEX["step"]], order="start")
        assert (phases["end"][:-1] <= phases["start"][1:]).all(), "phases overlap"
        exchanges = phases[np.isin(phases["phase"], [INDEX[name] for name in EXCHANGE])]
        calls.append([(record["phase"], record["bytes"]) for record in exchanges])
    kinds, others = ([phase for phase, _ in made] for made in calls)
    assert kinds == others
    looked_up = json.loads((run / "config.json").read_text())["looked_up"]
    if looked_up["apart"]:
        assert_rows_are_counted(ranks, looked_up["of_ranks"])
    else:
        assert calls[0] == calls[1]
    assert kinds.count(INDEX["reduce_scatter"]) == reduce_scatters
    assert kinds.count(INDEX["allgather"]) == all_gathers
    line = log(run)[-1]
    assert 0 < line["exposed_exchange_s"] < line["step_s"] + 1  # ranks may wait for rank 0 between its steps


@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_a_checkpoint_that_cannot_be_written_ends_all_ranks(comm, shared_path, tokens, capsys):
    out = shared_path / "run"
    if comm.rank == 0:
        out.mkdir()
        (out / "checkpoints").write_text("a file where the folder is to be")
    comm.Barrier()
    flags = [*FLAGS, *tokens, "--strategy", "zero-3", "--steps", 1, "--eval-every", 0, "--batch-size", 2]
    assert "checkpoints" in refusal_of_all(comm, capsys, train_here, start_world(), out, *flags)
