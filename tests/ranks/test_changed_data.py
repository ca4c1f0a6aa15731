"""Files of a run that are not what they were: data that were changed, or are others on a node; traces that cannot be.

Other data end the run with one line before it learns from them. Traces do not end it.
"""

import os
import shutil

import numpy as np
import pytest

from dist.world import start_world, world_of
from gpt2.data.shards import write_shard
from gpt2.errors import UserError
from scripts.training.worker import Worker
from tests.support.in_process import log, train
from tests.support.refusal import refusal_of_all
from tests.unit.test_huggingface import FIXTURE

SMALL = ["--n-layer", 1, "--n-head", 1, "--n-embd", 8, "--context", 16, "--vocab-size", 256, "--batch-size", 2]
SMALL += ["--threads", 1, "--trace", "off", "--stall-after", 0]


def write_data(folder, change=lambda tokens: None):
    """train.bin and val.bin, and a model."""
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(("train", "val")):
        tokens = np.random.default_rng(seed).integers(60, size=20_000)
        change(tokens)
        write_shard(folder / f"{name}.bin", tokens)
    shutil.copytree(FIXTURE, folder / "model", dirs_exist_ok=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "model/model-00002-of-00002.safetensors"])
def test_another_file_on_one_node(comm, tmp_path, shared_path, monkeypatch, capsys, name):
    """Two ranks of this machine stand for nodes with disks of their own: each is in a folder of its own."""
    world = world_of(comm, comm.Split(comm.rank, 0))
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ["--train-data", "train.bin", "--val-data", "val.bin", "--steps", 2]
    flags += ["--init", "model", "--seq-len", 16, "--batch-size", 2, *SMALL[-6:]] if name[0] == "m" else SMALL
    if comm.rank == 1:
        with open(name, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xfe")
    line = refusal_of_all(comm, capsys, train, world, shared_path / "run", *flags)
    host = world.places[1]["host"]
    assert line.startswith(f"error: {name}: other content of the same size on {host}, expected the same as on")
    assert not (shared_path / "run").exists()


@pytest.mark.ranks(1, 2)
def test_other_data_are_no_data_to_go_on_with(comm, shared_path, capsys):
    """One token of the middle is another: the beginnings of the shards are the same."""

    def change(tokens):
        tokens[10_000] ^= 1

    world, data = start_world(), ["--train-data", shared_path / "train.bin", "--val-data", shared_path / "val.bin"]
    if comm.rank == 0:
        write_data(shared_path)
    comm.Barrier()
    train(world, shared_path / "run", *SMALL, *data, "--steps", 2)
    comm.Barrier()
    if comm.rank == 0:
        write_data(shared_path, change)
    comm.Barrier()
    line = refusal_of_all(comm, capsys, train, world, shared_path / "run", *SMALL, *data, "--steps", 3, "--resume")
    assert line.startswith(f"error: {shared_path / 'run/checkpoints/step-00000002'}: its data is ")
    assert "change the training data" in line
    if comm.rank == 0:
        write_data(shared_path)
    comm.Barrier()
    train(world, shared_path / "run", *SMALL, *data, "--steps", 3, "--resume")
    assert [line["step"] for line in log(shared_path / "run")] == [1, 2, 3]


@pytest.mark.ranks(2)
def test_data_that_are_cut_while_training(comm, shared_path, monkeypatch):
    """All ranks read of the file in the step after."""
    if comm.rank == 0:
        write_data(shared_path)
    world, path, gradients = start_world(), shared_path / "train.bin", Worker.forward_backward

    def cut_then_compute(worker, step, gradients_final):
        if step == 3:
            os.truncate(path, 20_000)
        return gradients(worker, step, gradients_final)

    monkeypatch.setattr(Worker, "forward_backward", cut_then_compute)
    comm.Barrier()
    data = ["--train-data", path, "--val-data", shared_path / "val.bin"]
    with pytest.raises(UserError, match=f"^{path}: 20000 bytes, expected the 41024 that it had when it was opened"):
        train(world, shared_path / "run", *SMALL, *data, "--steps", 5)
    comm.Barrier()
    assert [line["step"] for line in log(shared_path / "run")] == [1, 2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_whose_traces_cannot_be_written(comm, shared_path, capfd, nodes):
    """A file has the folder's name: neither traces nor counters, clocks and the nodes' positions find a place."""
    world, run = world_of(comm, comm.Split(comm.rank % nodes, 0)), shared_path / "run"
    if comm.rank == 0:
        write_data(shared_path)
        run.mkdir()
        (run / "traces").touch()
    comm.Barrier()
    capfd.readouterr()
    data = ["--train-data", shared_path / "train.bin", "--val-data", shared_path / "val.bin"]
    train(world, run, *SMALL[:-4], *data, "--steps", 3, "--stall-after", 60)
    comm.Barrier()
    assert [line["step"] for line in log(run)] == [1, 2, 3]
    assert (run / "summary.json").exists()
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    if comm.rank == 0:
        off = f"warning: {run / 'traces'}: File exists: tracing is off from here on for rank 0 on {world.host}"
        assert warnings[0] == f"{off} and 1 more; training goes on"
    assert len(warnings) == (nodes if comm.rank == 0 else 0)  # on several nodes the clocks are missed, too
