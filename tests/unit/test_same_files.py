"""Files that are to be the same on all nodes: the nodes here are threads, each with a folder of its own."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.data.shards import write_shard
from gpt2.errors import UserError
from gpt2.formats import weights
from scripts.training import same_files
from scripts.training.same_files import SAMPLE_BYTES, check_same_files, fingerprints, in_both, made_for_all
from tests.support.thread_ranks import run_ranks
from tests.unit.test_huggingface import FIXTURE

RANKS_OF_NODES = [2, 2, 1]


def check_on_nodes(folders: list[Path], monkeypatch, capsys) -> str:
    """The line that the job ends with, "" if it goes on; each node finds its folder's files under the same names."""
    monkeypatch.setattr(
        same_files,
        "fingerprints",
        lambda files: [(p.name, *each) for p, (_, *each) in zip(files, fingerprints(files), strict=True)],
    )
    places = [{"host": f"cn{node}"} for node, ranks in enumerate(RANKS_OF_NODES) for _ in range(ranks)]

    def of_rank(world):
        nodes = SimpleNamespace(comm=world.comm, node_count=3, local_rank=world.local_rank, places=places)
        try:
            check_same_files(nodes, sorted(folders[world.node].iterdir()))
        except SystemExit as error:
            return error.code
        return 0

    codes = run_ranks(RANKS_OF_NODES, of_rank)
    line = capsys.readouterr().err
    assert codes == [2 if line else 0] * len(places)
    return line


@pytest.fixture
def folders(tmp_path):
    """Three nodes' folders of the same two shards, one of them of several MB."""
    for node in range(3):
        (tmp_path / str(node)).mkdir()
        write_shard(tmp_path / str(node) / "a.bin", np.arange(100))
        write_shard(tmp_path / str(node) / "b.bin", np.arange(3_000_000) % 777)
    return [tmp_path / str(node) for node in range(3)]


def test_files_that_are_in_both(folders, tmp_path):
    """By its own name, through a link, and as a copy."""
    one, (a, b) = folders[0], (folders[1] / "a.bin", folders[1] / "b.bin")
    (tmp_path / "link.bin").symlink_to(one / "b.bin")
    write_shard(tmp_path / "other.bin", np.arange(1, 101))
    assert in_both([tmp_path / "other.bin", one / "a.bin", tmp_path / "link.bin"], [a, one / "b.bin"]) == [
        str(one / "a.bin"), str(tmp_path / "link.bin")
    ]  # fmt: skip
    assert in_both([tmp_path / "other.bin"], [a, b]) == []


def change_a_token(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda node: None, None),
        (lambda node: change_a_token(node / "a.bin"), "a.bin: other content of the same size on cn{},"),
        (lambda node: change_a_token(node / "b.bin"), "b.bin: other content of the same size on cn{},"),
        (lambda node: write_shard(node / "b.bin", np.arange(3_000_000) % 776), "b.bin: other content of the same"),
        (lambda node: write_shard(node / "a.bin", np.arange(99)), "a.bin: 1222 bytes, not 1224, on cn{},"),
        (lambda node: write_shard(node / "c.bin", np.arange(99)), "c.bin: one file more on cn{},"),
        (lambda node: (node / "b.bin").unlink(), "b.bin: not there on cn{},"),
    ],
)
@pytest.mark.parametrize("node", [1, 2])
def test_other_files_on_one_node(folders, monkeypatch, capsys, change, found, node):
    change(folders[node])
    line = check_on_nodes(folders, monkeypatch, capsys)
    if found is None:
        assert line == ""
    else:
        assert line.startswith(f"error: {found.format(node)}")
        assert line.count("\n") == 1
        assert "expected the same as on cn0, where rank 0 is" in line


def test_other_files_on_rank_0s_node(folders, monkeypatch, capsys):
    change_a_token(folders[0] / "b.bin")
    assert "b.bin: other content of the same size on cn1, cn2, expected" in check_on_nodes(folders, monkeypatch, capsys)


def test_what_is_compared_is_spread_across_a_file(tmp_path):
    """A small file is read whole; of a large one, what is changed in more than one part in 512 is always seen."""
    path = tmp_path / "file"
    for size in (1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 100_000):
        content = bytearray(np.random.default_rng(size).bytes(size))
        path.write_bytes(content)
        before = fingerprints([path])
        assert before[0][:2] == (str(path), size)
        for position in {0, size // 3, size // 2, size - 1}:
            content[position] ^= 1
            path.write_bytes(content)
            assert fingerprints([path]) != before
            content[position] ^= 1
    path.write_bytes(bytes(8_000_000))
    before = fingerprints([path])
    for start in range(0, 8_000_000 - 20_000, 500_000):
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(b"\1" * 20_000)
        assert fingerprints([path]) != before
        path.write_bytes(bytes(8_000_000))


def test_a_file_of_no_bytes(tmp_path):
    (tmp_path / "empty").touch()
    assert fingerprints([tmp_path / "empty"])[0][1] == 0
    assert fingerprints([]) == []


def test_the_files_of_weights(tmp_path):
    folder = Path(shutil.copytree(FIXTURE, tmp_path / "hugging"))
    (folder / "README.md").write_text("another on each node")
    tensors = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = ["config.json", *tensors, "model.safetensors.index.json"]
    assert [path.name for path in weights.files(folder)] == names
    assert [path.name for path in weights.files(folder / tensors[1])] == ["config.json", tensors[1]]


class Alone:
    """A job of one rank; others_see: whether another node has the paths too."""

    rank = 0

    def __init__(self, others_see: bool):
        self.comm, self.others_see = self, others_see

    def bcast(self, value):
        return value

    def allgather(self, value) -> list:
        return [value, self.others_see]

    def together(self, mistake):
        return nullcontext()


@pytest.mark.parametrize(
    ("others_see", "full", "where"), [(True, False, "cache"), (False, False, "beside"), (True, True, "beside")]
)
def test_what_a_text_becomes_lies_in_the_users_cache_where_all_see_it(tmp_path, monkeypatch, others_see, full, where):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(folder, remark):
        if full and folder.is_relative_to(tmp_path / "cache"):
            raise UserError("no space left on device")
        folder.mkdir(parents=True)
        (folder / "a.bin").write_text("")
        return (folder / "a.bin",)

    (found,) = made_for_all(Alone(others_see), make, tmp_path / "beside")
    assert Path(found).is_relative_to(tmp_path / where)
    assert Path(found).exists()


def test_a_mistake_in_the_text_is_told(tmp_path, monkeypatch):
    def refuse(folder, remark):
        raise UserError("a.txt: the file is empty")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="empty"):
        made_for_all(Alone(True), refuse, tmp_path / "beside")
