"""Data that are not what they were, or not the same on all nodes: a run ends with one line and learns nothing."""

import shutil

import numpy as np
import pytest

from gpt2.data.shards import write_shard
from tests.support.in_process import log, train
from tests.unit.test_huggingface import FIXTURE

SMALL = ["--n-layer", 1, "--n-head", 1, "--n-embd", 8, "--context", 16, "--vocab-size", 256, "--batch-size", 2]
SMALL += ["--threads", 1, "--trace", "off", "--stall-after", 0]


def write_data(folder, change=lambda tokens: None):
    """train.bin and val.bin, and a model."""
    folder.mkdir(exist_ok=True)
    for name in ("train", "val"):
        tokens = np.random.default_rng(7).integers(60, size=20_000)
        change(tokens)
        write_shard(folder / f"{name}.bin", tokens)
    shutil.copytree(FIXTURE, folder / "model", dirs_exist_ok=True)


def refusal(capfd, world, *arguments) -> str:
    """What all ranks together print on stderr when a run ends with the code of a user's mistake."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        train(world, *arguments)
    assert ended.value.code == 2
    return "".join(world.comm.allgather(capfd.readouterr().err))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "model/model-00002-of-00002.safetensors"])
def test_another_file_on_one_node(comm, tmp_path, shared_path, monkeypatch, capfd, name):
    """Two ranks of this machine stand for nodes with disks of their own: each is in a folder of its own."""
    from dist.world import world_of

    world = world_of(comm, comm.Split(comm.rank, 0))
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ["--train-data", "train.bin", "--val-data", "val.bin", "--steps", 2]
    flags += ["--init", "model", "--seq-len", 16, "--batch-size", 2, *SMALL[-6:]] if name[0] == "m" else SMALL
    if comm.rank == 1:
        with open(name, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xfe")
    line = refusal(capfd, world, shared_path / "run", *flags)
    host = world.places[1]["host"]
    assert line.startswith(f"error: {name}: other content of the same size on {host}, expected the same as on")
    assert line.count("\n") == 1
    assert not (shared_path / "run").exists()


@pytest.mark.ranks(1, 2)
def test_other_data_are_no_data_to_go_on_with(comm, shared_path, capfd):
    """One token of the middle is another: the beginnings of the shards are the same."""
    from dist.world import start_world

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
    line = refusal(capfd, world, shared_path / "run", *SMALL, *data, "--steps", 3, "--resume")
    assert line.startswith(f"error: {shared_path / 'run/checkpoints/step-00000002'}: its data is ")
    assert "change the training data" in line
    if comm.rank == 0:
        write_data(shared_path)
    comm.Barrier()
    train(world, shared_path / "run", *SMALL, *data, "--steps", 3, "--resume")
    assert [line["step"] for line in log(shared_path / "run")] == [1, 2, 3]
