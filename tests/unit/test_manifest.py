"""What a folder of shards was made of decides whether prepare.py goes on with it."""

import pytest

from gpt2.errors import UserError
from scripts.preparation import manifest

WAS = {"tokenizer": "bytes", "options": {"shard_tokens": 5}, "inputs": [{"path": "a", "bytes": 9, "sha256": "1"}]}


def test_shards_of_the_same_files_and_options_are_gone_on_with(tmp_path):
    manifest.check_made_alike(tmp_path, WAS, WAS)
    manifest.check_same_inputs(tmp_path, WAS, [{"path": "elsewhere", "bytes": 9, "sha256": "1"}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "gpt2"}, "made with --tokenizer bytes, this is gpt2"),
        ({"options": {"shard_tokens": 6}}, "made with --shard-tokens 5, this is 6"),
    ],
)
def test_shards_of_another_tokenizer_or_size_are_refused(change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        manifest.check_made_alike(tmp_path, WAS, WAS | change)


def test_shards_of_other_files_are_refused(tmp_path):
    """Also of files that are as long."""
    with pytest.raises(UserError, match="made of a with other contents than b has now"):
        manifest.check_same_inputs(tmp_path, WAS, [{"path": "b", "bytes": 9, "sha256": "2"}])
    with pytest.raises(UserError, match="made of 1 files, these are 2"):
        manifest.check_same_inputs(tmp_path, WAS, WAS["inputs"] * 2)


def test_half_a_folder_of_another_version_is_not_gone_on_with(tmp_path):
    """Its shards end where that version's pieces of the text end. A folder without shards is begun again."""
    manifest.check_read_alike(tmp_path, WAS | {"shards": [{}], "reading": manifest.READING})
    manifest.check_read_alike(tmp_path, WAS | {"shards": []})
    with pytest.raises(UserError, match="begun by another version, which reads text in another way"):
        manifest.check_read_alike(tmp_path, WAS | {"shards": [{}], "reading": manifest.READING - 1})
