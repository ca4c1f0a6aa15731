"""A pipe in a file's place is refused at once by all that read runs, weights and texts: its writer may never come."""

import os

import pytest

from gpt2.data.texts import read_documents
from gpt2.errors import UserError
from gpt2.files import read_bytes
from gpt2.formats import checkpoints, safetensors, weights
from scripts.settings.tokenizer import tokenizer_of_run, tokenizer_of_shards
from scripts.training.folder import RunFolder
from tests.support.make_run import three_ranks, write_run
from traces import RunError, read_run

pytestmark = [pytest.mark.any_mpi]


@pytest.fixture
def pipe(tmp_path):
    def make(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return path

    return make


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.txt", lambda path: read_documents(path)),
        ("a.bin", lambda path: weights.read_config(path)),
        ("a.safetensors", lambda path: safetensors.read_header(path)),
        ("checkpoint.json", lambda path: checkpoints.Checkpoint(path.parent)),
        ("log.jsonl", lambda path: RunFolder(path.parent, lambda: None, None)),
    ],
)
def test_a_pipe_is_refused(pipe, name, read):
    with pytest.raises(UserError, match=r"not a (regular )?file|a named pipe"):
        read(pipe(name))


def test_a_pipe_as_hugging_faces_config(pipe, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    pipe("config.json")
    with pytest.raises(UserError):
        weights.read_config(tmp_path)


def test_a_run_whose_config_is_a_pipe_knows_no_tokenizer(pipe):
    assert tokenizer_of_run(pipe("config.json").parent) is None


def test_shards_whose_manifest_is_a_pipe_know_no_tokenizer(pipe):
    path = pipe("manifest.json").with_name("a.bin")
    path.touch()
    assert tokenizer_of_shards(str(path)) is None


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "traces/rank-00000.trace"])
def test_a_run_with_a_pipe_in_it(pipe, tmp_path, name):
    write_run(tmp_path, three_ranks(4), [0, 0, 1])
    pipe(name)
    with pytest.raises(RunError, match="not a regular file"):
        read_run(tmp_path)


def test_folders_and_missing_files_have_their_own_words(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"whole")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"whole"
