"""The tokenizer's files beside an exported model: an encoder made of them alone gives tiktoken's ids."""

import json
from collections import Counter
from itertools import pairwise

import pytest
import regex
import tiktoken

from gpt2.data.tokenizers import GPT2_FILES, byte_encoding, load_tokenizer
from gpt2.errors import UserError
from gpt2.formats import huggingface_export
from gpt2.formats.huggingface_tokenizer import (
    OTHER,
    byte_characters,
    described,
    merges_of,
    tokenizer_of_folder,
    vocabulary_of,
    write_tokenizer,
)
from gpt2.parameters import Layout, Parameters
from scripts import export
from scripts.settings.tokenizer import choose_tokenizer
from tests.support.safetensors_file import CONFIG
from tests.unit.test_tokenizers import CACHE, gpt2, needs_vocabulary, offline  # noqa: F401

pytestmark = pytest.mark.any_mpi
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
TEXTS = (
    "the theatre's other authors, don't they'LL?", "  two  spaces\n\n\t\ttab ", "naïve 東京 🎉👩‍👩‍👧\u00a0x", "a" * 99,
    "", "1234567 +-*/ {}[]", "\r\n\x00\x7f", "ththththeethe", "x<|endoftext|>y",
)  # fmt: skip


def learned(text: str) -> dict[bytes, int]:
    """Ranks of a small vocabulary: the pair that is there most often is merged next (Gage 1994). Bytes in odd order."""
    ranks = {bytes([byte * 77 % 256]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(PATTERN, text)]
    while found := Counter(pair for word in words for pair in pairwise(word)).most_common(1):
        ((left, right), _), *_ = found
        assert left + right not in ranks
        ranks[left + right] = len(ranks)
        words = [merged(word, left, right) for word in words]
    return ranks


def merged(word: list, left, right) -> list:
    found = []
    for part in word:
        if found and (found[-1], part) == (left, right):
            found[-1] = left + right
        else:
            found.append(part)
    return found


def encode(folder, text: str) -> list[int]:
    """By vocab.json and merges.txt: each merge over the whole word, in their order."""
    numbers = json.loads((folder / "vocab.json").read_text("utf-8"))
    head, *lines = (folder / "merges.txt").read_text("utf-8").splitlines()
    assert head == "#version: 0.2"
    pairs, ids = [line.split(" ") for line in lines], []
    for word in regex.findall(PATTERN, text):
        parts = [byte_characters()[byte] for byte in word.encode()]
        for left, right in pairs:
            if len(parts) > 1:
                parts = merged(parts, left, right)
        ids += [numbers[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(encoding, folder with its files) of some 300 tokens, the last of which ends a text."""
    ranks = learned("the then other theatre mother's  authors\n\n  don't they author 東京 東西 " * 3)
    special = {"<|endoftext|>": len(ranks)}
    encoding = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    folder = tmp_path_factory.mktemp("small")
    write_tokenizer(folder, encoding, 64)
    return encoding, folder


@pytest.mark.parametrize("text", TEXTS)
def test_merges_alone_give_tiktokens_ids(small, text):
    encoding, folder = small
    assert encode(folder, text) == encoding.encode_ordinary(text)


@needs_vocabulary
def test_gpt2s_files_are_the_original_ones(gpt2, tmp_path):  # noqa: F811
    write_tokenizer(tmp_path, gpt2, 1024)
    assert (tmp_path / "merges.txt").read_bytes() == (CACHE / GPT2_FILES["vocab.bpe"]).read_bytes()
    original = json.loads((CACHE / GPT2_FILES["encoder.json"]).read_text("utf-8"))
    assert json.loads((tmp_path / "vocab.json").read_text("utf-8")) == original
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["eos_token"]) == ("GPT2Tokenizer", "<|endoftext|>")


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
@pytest.mark.parametrize("known", ["bytes", pytest.param("gpt2", marks=needs_vocabulary)])
def test_a_folders_tokenizer_is_told_by_its_tokens(known, tmp_path, name, monkeypatch):
    """GPT-2s of other languages have as many tokens as the English one."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))
    assert tokenizer_of_folder(tmp_path) is None
    encoding = load_tokenizer(known)
    ids = vocabulary_of(encoding)
    for vocabulary in (ids, ids | encoding._special_tokens):
        (tmp_path / name).write_text(json.dumps(described(vocabulary, [], {}) if "z" in name else vocabulary), "utf-8")
        assert tokenizer_of_folder(tmp_path) == known
    ids["A"], ids["B"] = ids["B"], ids["A"]
    (tmp_path / name).write_text(json.dumps(described(ids, [], {}) if "z" in name else ids), "utf-8")
    assert tokenizer_of_folder(tmp_path) == OTHER
    (tmp_path / name).write_text('{"model": [1]}')
    assert tokenizer_of_folder(tmp_path) == OTHER
    (tmp_path / name).write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        tokenizer_of_folder(tmp_path)


def test_another_tokenizer_is_neither_used_nor_exported(tmp_path):
    folder = tmp_path / "model"
    huggingface_export.write_parameters(folder, Parameters.zeros(Layout(CONFIG)), tokenizer=byte_encoding())
    assert choose_tokenizer(None, folder, 256).name == "bytes"
    described = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = described["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"model\.safetensors: its tokenizer is unknown, expected gpt2 or bytes"):
        choose_tokenizer(None, folder / "model.safetensors", 256)
    assert choose_tokenizer("bytes", folder, 256).name == "bytes"
    assert choose_tokenizer(None, folder / "other.bin", 256).name == "bytes", "llm.c has none beside its files"
    assert export.exported_tokenizer(None, folder, 256)[0] is None
    assert export.exported_tokenizer("bytes", folder, 256)[0].name == "bytes"


def test_a_token_that_no_merge_makes_is_refused():
    with pytest.raises(ValueError, match="not made of two tokens"):
        merges_of({b"a": 0, b"b": 1, b"c": 2, b"abc": 3})


def test_bytes_have_no_merges_and_no_file_of_them(tmp_path):
    parameters = Parameters.zeros(Layout(CONFIG))
    huggingface_export.write_parameters(tmp_path / "out", parameters, tokenizer=byte_encoding())
    names = {path.name for path in (tmp_path / "out").iterdir()} - {"model.safetensors", "config.json"}
    assert names == {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    model = json.loads((tmp_path / "out" / "tokenizer.json").read_text("utf-8"))["model"]
    assert model["merges"] == []
    assert model["vocab"]["A"] == 65
    assert len(model["vocab"]) == 256
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] is None


def test_without_gpt2s_files_the_model_goes_alone(offline):  # noqa: F811
    tokenizer, why = export.exported_tokenizer(None, offline, 50257)
    assert tokenizer is None
    assert "set TIKTOKEN_CACHE_DIR" in why
    assert export.exported_tokenizer(None, offline, 777)[0] is None
    tokenizer, why = export.exported_tokenizer(None, offline, 256)
    assert (tokenizer.n_vocab, why) == (load_tokenizer("bytes").n_vocab, "")
