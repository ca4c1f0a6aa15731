"""The two tokenizers and text to shards; GPT-2's against known counts, where its vocabulary files are at hand."""

import time
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import tiktoken.load
import tiktoken.registry

from gpt2.data.documents import split_documents
from gpt2.data.shards import open_shard
from gpt2.data.texts import content_hash, join_tokens, prepare, read_documents, split, tokens_of
from gpt2.data.tokenizers import GPT2_FILES, gpt2_encoding, load_tokenizer
from gpt2.errors import UserError
from tests.support.refusal import refusal

SHARED = Path(__file__).parents[3] / "shared"  # beside the project
CACHE, SHAKESPEARE = SHARED / "tiktoken_cache", SHARED / "corpus" / "tinyshakespeare.txt"

needs_vocabulary = pytest.mark.skipif(
    not all((CACHE / key).is_file() for key in GPT2_FILES.values()), reason=f"no GPT-2 vocabulary files in {CACHE}"
)


@pytest.fixture
def gpt2(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))
    return load_tokenizer("gpt2")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """An empty cache folder, and a network on which every download fails."""

    def fail(address):
        raise ConnectionError(f"no route\nto {address}")

    monkeypatch.setattr(tiktoken.load, "read_file", fail)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("text", ["", "aé\n", "naïve €𝄞\r\n\x00", "".join(map(chr, range(1, 1000)))])
def test_bytes(text):
    encoding = load_tokenizer("bytes")
    tokens = tokens_of(text, encoding)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == encoding.encode_ordinary(text) == list(text.encode())
    assert encoding.n_vocab == 256
    assert encoding.decode_bytes(range(256)) == bytes(range(256))


@needs_vocabulary
def test_gpt2(gpt2):
    assert gpt2.n_vocab == 50257
    assert gpt2.eot_token == 50256
    assert tokens_of("hello world", gpt2).tolist() == [31373, 995]
    special = "a<|endoftext|>b"
    assert tokens_of(special, gpt2).tolist() == gpt2.encode_ordinary(special)
    assert 50256 not in tokens_of(special, gpt2)
    assert join_tokens(["hello", "hello"], gpt2).tolist() == [31373, 50256, 31373]


@needs_vocabulary
@pytest.mark.skipif(not SHAKESPEARE.is_file(), reason=f"no {SHAKESPEARE}")
def test_gpt2_on_shakespeare(gpt2, tmp_path):
    text = SHAKESPEARE.read_bytes().decode("utf-8")
    tokens = tokens_of(text, gpt2)
    assert len(tokens) == 338_025
    assert gpt2.decode(tokens) == text
    assert len(tokens_of(text, load_tokenizer("bytes"))) == 1_115_394
    train, validation = map(open_shard, prepare(SHAKESPEARE, "gpt2", tmp_path))
    assert len(train) == 301_966  # nanoGPT's counts for its split
    assert len(validation) == 36_059
    assert gpt2.decode(np.concatenate([train[:], validation[:]])) == text


def test_missing_files_are_named(offline, monkeypatch):
    """Those in the cache folder, if there is one and a place for it."""
    assert "'words' is unknown, expected one of gpt2, bytes" in refusal(load_tokenizer, "words")
    message = refusal(load_tokenizer, "gpt2")
    assert "://" not in message
    for fact in ["vocab.bpe and encoder.json not in", str(offline), "TIKTOKEN_CACHE_DIR", "ConnectionError"]:
        assert fact in message
    assert all(key in message for key in GPT2_FILES.values())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert "not in any cache folder" in refusal(load_tokenizer, "gpt2")

    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", none)
    assert "not in any cache folder" in refusal(load_tokenizer, "gpt2")


@needs_vocabulary
def test_only_the_missing_file_is_called_missing(offline):
    key = GPT2_FILES["vocab.bpe"]
    (offline / key).write_bytes((CACHE / key).read_bytes())
    with pytest.raises(UserError, match=r"loaded: encoder\.json not in"):
        load_tokenizer("gpt2")


@needs_vocabulary
def test_cached_files_need_no_network(offline, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))
    assert load_tokenizer("gpt2").n_vocab == 50257


def test_a_network_that_does_not_answer_is_given_up(monkeypatch):
    never = Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: never.wait(20))
    start = time.monotonic()
    with pytest.raises(UserError, match=r"no answer in 0\.1 s"):
        gpt2_encoding(limit_s=0.1)
    never.set()
    assert time.monotonic() - start < 5


# Texts


def test_a_text_is_split_like_nanogpt_and_cached(tmp_path):
    text = tmp_path / "play.txt"
    text.write_text("aé" * 505, encoding="utf-8")
    train, validation = prepare(text, "bytes", tmp_path / "cache" / "deep")
    assert bytes(open_shard(train)[:].astype(np.uint8)).decode() == ("aé" * 505)[:909]
    assert bytes(open_shard(validation)[:].astype(np.uint8)).decode() == ("aé" * 505)[909:]
    assert train.parent == tmp_path / "cache" / "deep"
    assert train.name.startswith("play-bytes-")
    assert train.name.endswith("-train.bin")
    assert validation.name == train.name.replace("-train", "-val")


def test_valid_shards_are_reused_and_broken_ones_made_again(tmp_path):
    text = tmp_path / "play.txt"
    text.write_text("abcdefghij" * 10)
    paths = prepare(text, "bytes", tmp_path)
    before = [path.stat().st_mtime_ns for path in paths]
    assert prepare(text, "bytes", tmp_path) == paths
    assert [path.stat().st_mtime_ns for path in paths] == before
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:-1])
    assert prepare(text, "bytes", tmp_path) == paths
    assert paths[1].read_bytes() == content
    text.write_text("abcdefghij" * 9 + "abcdefghiJ")
    assert set(prepare(text, "bytes", tmp_path)).isdisjoint(paths)


def test_a_folder_is_joined_in_sorted_order(tmp_path):
    (tmp_path / "texts" / "b").mkdir(parents=True)
    (tmp_path / "texts" / "c.txt").write_text("3" * 30)
    (tmp_path / "texts" / "b" / "x.txt").write_text("2" * 30)
    (tmp_path / "texts" / "a.txt").write_text("1" * 30)
    (tmp_path / "texts" / "a.md").write_text("not this")
    train, validation = prepare(tmp_path / "texts", "bytes", tmp_path)
    assert train.name.startswith("texts-bytes-")
    assert bytes(open_shard(train)[:].astype(np.uint8)) == b"1" * 30 + b"\n" + b"2" * 30 + b"\n" + b"3" * 21
    assert bytes(open_shard(validation)[:].astype(np.uint8)) == b"3" * 9


@needs_vocabulary
def test_documents_end_at_a_literal_end_of_text_if_asked(gpt2, tmp_path):
    """As tiktoken reads it. Otherwise one line says that it is ordinary text."""
    path = tmp_path / "stories.txt"
    text = "Once.\n<|endoftext|>\nTwice, <|endo<|endoftext|> thrice<|endoftext"
    path.write_text(text)
    documents, _, remarks = read_documents(path, splits=True)
    assert join_tokens(documents, gpt2).tolist() == gpt2.encode(text, allowed_special={"<|endoftext|>"})
    assert str(remarks) == ""
    documents, _, remarks = read_documents(path)
    assert join_tokens(documents, gpt2).tolist() == gpt2.encode_ordinary(text)
    assert str(remarks).startswith("<|endoftext|> is read as ordinary text; with --split-documents a document ends")


@pytest.mark.parametrize("size", [1, 2, 5, 13, 14, 1000])
def test_documents_are_split_wherever_chunks_end(size):
    mark = "<|endoftext|>"
    documents = [f"{mark}a<|endo{mark}{mark}<|", "", f"text|>b{mark}", mark[:-1], ">c<<|endoftext|"]
    chunks = []
    for document in documents:
        parts = [document[start : start + size] for start in range(0, len(document), size)] or [""]
        chunks += [(place == 0, part) for place, part in enumerate(parts)]
    found = []
    for begins, part in split_documents(chunks):
        if begins:
            found.append("")
        found[-1] += part
    assert found == [part for document in documents for part in document.split(mark)]


@pytest.mark.parametrize("lengths", [(10,), (5, 5), (9, 1), (1, 9), (3, 3, 3, 1), (92, 3, 5), (4, 96)])
def test_the_split_keeps_every_character(lengths):
    documents = [chr(97 + number) * length for number, length in enumerate(lengths)]
    train, validation = split(documents)
    assert "".join(train) == "".join(documents)[: int(0.9 * sum(lengths))]
    assert "".join(train) + "".join(validation) == "".join(documents)
    assert all([*train, *validation])


def test_the_hash_tells_documents_and_tokenizers_apart():
    variants = [(["ab", "c"], "gpt2"), (["a", "bc"], "gpt2"), (["abc"], "gpt2"), (["abc"], "bytes")]
    assert len({content_hash(*variant) for variant in variants}) == 4


def test_refuses_unusable_texts(tmp_path):
    path = tmp_path / "a.txt"
    assert "No such file" in refusal(prepare, path, "bytes", tmp_path)
    path.write_bytes(b"a" * 10)
    message = refusal(prepare, path, "bytes", tmp_path)
    for fact in [str(path), "10 characters leave 1 tokens for validation", "expected at least 2"]:
        assert fact in message
    path.write_text("abcdefghij" * 10)
    message = refusal(prepare, path, "bytes", path / "cache")
    assert str(path / "cache") in message
    assert "writable folder" in message
