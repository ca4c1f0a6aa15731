"""scripts/prepare.py: the tokens of gpt2.data.texts, whatever they come from; what it refuses."""

import gzip
import shlex
import subprocess
import sys

import numpy as np
import pytest

from gpt2.data import documents as prepare_documents
from gpt2.data import inputs as prepare_files
from gpt2.data import texts
from gpt2.data.shards import open_shard, shard_paths
from scripts.preparation import batches as prepare_batches
from scripts.prepare import parse
from tests.support.prepared import manifest_of, nonsense, run, tokens_in, use_vocabulary, write_folder, write_jsonl
from tests.unit.test_tokenizers import SHAKESPEARE, needs_vocabulary, refusal

TOKENIZERS = ["bytes", pytest.param("gpt2", marks=needs_vocabulary)]
DOCUMENTS = ["First line.\n second", "", "é'll 字。\n\n  x", " ", "\n", "last <|endoftext|> one\r\n" * 9]


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch):
    use_vocabulary(monkeypatch)


@needs_vocabulary
@pytest.mark.skipif(not SHAKESPEARE.is_file(), reason=f"no {SHAKESPEARE}")
def test_shakespeare(tmp_path):
    run(SHAKESPEARE, "--out", tmp_path / "whole", "--val-percent", 0, tokenizer="gpt2")
    (whole,) = (tmp_path / "whole").glob("*.bin")
    assert len(open_shard(whole)) == 338_025
    run(SHAKESPEARE, "--out", tmp_path / "split", tokenizer="gpt2")
    expected = texts.prepare(SHAKESPEARE, "gpt2", tmp_path)
    for split, path in zip(("train", "val"), expected, strict=True):
        assert (tmp_path / f"split/tinyshakespeare_{split}_000000.bin").read_bytes() == path.read_bytes()


def test_the_patterns_that_it_prints_match_the_shards(tmp_path, capsys):
    """A glob's own signs in the folder's name stand for themselves, and a shell reads the pattern as one word."""
    folder = tmp_path / "run [1] of 'mine'*"
    run(write_folder(tmp_path / "in", ["Some text. " * 9]), "--out", folder)
    printed = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines() if "shard(s)" in line]
    for line, split in zip(printed, ("train", "val"), strict=True):
        flag, pattern = shlex.split(line)
        assert (flag, shard_paths(pattern)) == (f"--{split}-data", [folder / f"in_{split}_000000.bin"])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("batch", [1, 7, 100, 1 << 18])
@pytest.mark.parametrize("splits", [False, True])
def test_tokens_are_those_of_text(tmp_path, monkeypatch, tokenizer, batch, splits):
    """A folder, cut into batches of any size: the very shards of train.py --text, the border inside a document."""
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", batch)
    folder = write_folder(tmp_path / "texts", [nonsense(300), *(nonsense(9, seed) for seed in range(99))])
    run(folder, "--out", tmp_path / "out", *["--split-documents"] * splits, tokenizer=tokenizer)
    expected = texts.prepare(folder, tokenizer, tmp_path, splits=splits)
    for split, path in zip(("train", "val"), expected, strict=True):
        assert (tmp_path / f"out/texts_{split}_000000.bin").read_bytes() == path.read_bytes()
    found = list(prepare_batches.read_pieces(prepare_files.file_of(folder / "000.txt"), "text"))
    assert (len(found) > 1) == (batch <= 100)


def test_a_literal_end_of_text_is_remarked(tmp_path, monkeypatch, capsys):
    """Once for all files, however short the pieces are, and not where documents are split there."""
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", 1)
    folder = write_folder(tmp_path / "texts", ["one <|endoftext|>two\n<|endoftext|>", "three", "four<|endoftext|>"])
    run(folder, "--out", tmp_path / "text")
    assert [source["end_of_text"] for source in manifest_of(tmp_path / "text")["inputs"]] == [True, False, True]
    said = capsys.readouterr().err
    assert said.count("<|endoftext|> is read as ordinary text") == 1
    assert "2 of the files" in said
    run(folder, "--out", tmp_path / "split", "--split-documents")
    assert "endoftext" not in capsys.readouterr().err
    inputs = manifest_of(tmp_path / "split")["inputs"]
    assert [source["documents"] for source in inputs] == [2, 1, 1]
    assert [source["empty_documents"] for source in inputs] == [1, 0, 1]


def test_a_text_of_many_blocks(tmp_path, monkeypatch):
    """Characters across the ends of blocks, whatever the blocks' size."""
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", 40)
    text = nonsense(500)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    expected = list(prepare_batches.read_pieces(prepare_files.file_of(path), "text"))
    assert "".join(piece for _, piece in expected) == text
    assert [begins for begins, _ in expected] == [True] + [False] * (len(expected) - 1)
    for size in (1, 2, 3, 97):
        monkeypatch.setattr(prepare_files, "BLOCK_BYTES", size)
        assert list(prepare_batches.read_pieces(prepare_files.file_of(path), "text")) == expected


@pytest.mark.parametrize("percent", ["0", "0.5", "10", "33.3", "99"])
def test_validation_split(tmp_path, percent):
    """The last characters, one document cut in two; separators between documents, none at a split's ends."""
    documents = [nonsense(99, seed) for seed in range(5)]
    run(write_jsonl(tmp_path / "a.jsonl", documents), "--out", tmp_path / "out", "--val-percent", percent)
    count = sum(map(len, documents))
    border = count * (1000 - int(float(percent) * 10)) // 1000
    joined = "\n".join(documents)
    begun = len("".join(documents)[:border].encode())
    train = tokens_in(tmp_path / "out", "train").astype(np.uint8).tobytes()
    assert len(train.replace(b"\n", b"")) == len("".join(documents)[:border].encode().replace(b"\n", b""))
    assert joined.encode().startswith(train)
    assert begun <= len(train) < begun + 5
    if percent == "0":
        assert train == joined.encode()
        assert not list((tmp_path / "out").glob("*_val_*"))
    else:
        validation = tokens_in(tmp_path / "out", "val").astype(np.uint8).tobytes()
        assert joined.encode().endswith(validation)
        assert len(joined.encode()) - len(train) - len(validation) in (0, 1)  # the separator where nothing is cut


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_packed(tmp_path, kind, packing, monkeypatch):
    path = tmp_path / f"a.{kind}"
    content = DOCUMENTS[5].encode() if kind == "txt" else write_jsonl(path, DOCUMENTS).read_bytes()
    half = len(content) // 2
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd(packing).compress}[packing]
    path = tmp_path / f"a.{kind}{packing}".upper()
    path.write_bytes(pack(content[:half]) + pack(content[half:]))  # two members, two frames
    run(path, "--out", tmp_path / "out", "--val-percent", 0)
    separated = "\n".join(DOCUMENTS[5:] if kind == "txt" else filter(None, DOCUMENTS))
    assert tokens_in(tmp_path / "out", "train").astype(np.uint8).tobytes() == separated.encode()
    (facts,) = manifest_of(tmp_path / "out")["inputs"]
    assert (facts["documents"], facts["empty_documents"]) == ((1, 0) if kind == "txt" else (5, 1))
    assert facts["bytes"] == path.stat().st_size
    if packing:
        path.write_bytes(path.read_bytes()[:-3])
        name = "gzip" if packing == ".gz" else "zstd"
        assert f"{path}: the {name} file is " in refusal(run, path, "--out", tmp_path / "b")
    if packing == ".zst":
        monkeypatch.setitem(sys.modules, "zstandard", None)
        assert "needs the package zstandard" in refusal(run, path, "--out", tmp_path / "b")


def zstd(packing: str):
    if packing == ".zst":
        return pytest.importorskip("zstandard", reason="no zstandard: pip install zstandard").ZstdCompressor()
    return gzip


@pytest.fixture
def parquet():
    pytest.importorskip("pyarrow", reason="no pyarrow: pip install pyarrow")
    from pyarrow import parquet, table

    def write(path, **columns):
        parquet.write_table(table(columns), path, row_group_size=70)
        return path

    return write


def test_parquet(tmp_path, parquet):
    documents = [*DOCUMENTS, None, *(nonsense(50, seed) for seed in range(200))]
    path = parquet(tmp_path / "a.parquet", id=list(range(len(documents))), text=documents)
    run(path, "--out", tmp_path / "out", "--val-percent", 0)
    expected = "\n".join(filter(None, documents)).encode()
    assert tokens_in(tmp_path / "out", "train").astype(np.uint8).tobytes() == expected
    assert manifest_of(tmp_path / "out")["inputs"][0]["empty_documents"] == 2
    run(path, "--out", tmp_path / "again", "--val-percent", 0, "--shard-tokens", 100)
    assert np.array_equal(tokens_in(tmp_path / "again", "train"), tokens_in(tmp_path / "out", "train"))


def test_texts_in_parquet_of_any_type(tmp_path, parquet):
    """Also beside structures whose fields have the column's name, and beside other columns of one name."""
    import pyarrow

    path = tmp_path / "a.parquet"
    words = pyarrow.array(["one", None, "", "two"])
    columns = {"meta": [{"text": "no"}] * 4, "meta.text": words}
    for column in (words.cast("large_string"), words.dictionary_encode(), words):
        parquet(path, **columns | {"meta.text": column})
        chunks = prepare_documents.read_chunks(prepare_files.file_of(path), "meta.text")
        assert list(chunks) == [(True, "one"), (True, ""), (True, ""), (True, "two")]
    table = pyarrow.Table.from_arrays([words, words, words], names=["id", "text", "id"])
    pyarrow.parquet.write_table(table, path, row_group_size=1)
    assert "".join(text for _, text in prepare_documents.read_chunks(prepare_files.file_of(path), "text")) == "onetwo"


def test_bad_parquet(tmp_path, parquet, monkeypatch):
    import pyarrow

    path = parquet(tmp_path / "a.parquet", id=[1, 2], body=["a", "b"])
    out = ("--out", tmp_path / "out")
    assert "holds 'id', 'body', expected a column 'text'" in refusal(run, path, *out)
    assert "column 'id' is int64, expected text" in refusal(run, path, *out, "--field", "id")
    for kind, values in (("binary", [b"a"]), ("list<element: string>", [["a"]]), ("null", [None]), ("int64", [1])):
        parquet(path, text=values)
        assert f"column 'text' is {kind}, expected text" in refusal(run, path, *out)
    for kind, values in (("struct<a: string>", [{"a": "b"}]), ("dictionary<values=", None)):
        parquet(path, text=values or pyarrow.array([b"a"]).dictionary_encode())
        assert f"column 'text' is {kind}" in refusal(run, path, *out)
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text"] * 2), path)
    assert "holds 2 columns 'text', expected one: rename the others" in refusal(run, path, *out)
    path.write_bytes(path.read_bytes()[:-5])
    assert "cannot be read as Parquet" in refusal(run, path, *out)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal(run, path, *out).endswith("needs the package pyarrow: pip install pyarrow")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', "line 2 is not JSON (Expecting value"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"a": 1, "b": 2}', "line 1 holds 'a', 'b', expected the field 'text'"),
        (b"\n\n[1]", "line 3 holds a list, expected an object"),
        (b'{"text": 5}', "line 1 has as 'text' a number, expected text"),
        (b'{"text": "\xff"}', "line 1 is not UTF-8 at its byte 10 (0xff)"),
        (b'{"text": "a\\ud83d"}', r"line 1 holds half a character (\ud83d)"),
        (b'{"text": {"text": "a"}}', "line 1 has as 'text' an object, expected text"),
        (b'{"text": ""}\n{"text": null}\n', "no text in it, expected one document or more"),
        (b"", "no text in it"),
    ],
)
def test_bad_jsonl(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    found = refusal(run, path, "--out", tmp_path / "out")
    assert found.startswith(f"{path}: ")
    assert message in found
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_documents, "LONGEST_LINE", 1000)
    monkeypatch.setattr(prepare_files, "BLOCK_BYTES", 100)
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * 900])
    run(path, "--out", tmp_path / "out")
    write_jsonl(path, ["x" * 1100])
    assert "a line is longer than 1000 bytes" in refusal(run, path, "--out", tmp_path / "out2")


@pytest.mark.parametrize(("block", "content", "byte"), [(1 << 20, b"a\xe9", 1), (2, b"abc\xe5\xad\xff", 3)])
def test_text_that_is_not_utf8(tmp_path, monkeypatch, block, content, byte):
    monkeypatch.setattr(prepare_files, "BLOCK_BYTES", block)
    folder = write_folder(tmp_path / "a", ["fine", "fine"])
    (folder / "000.txt").write_bytes(content)
    message = refusal(run, folder, "--out", tmp_path / "out")
    assert message.startswith(f"{folder / '000.txt'}: byte {byte} (0x{content[byte]:02x}) is not UTF-8")


def test_bad_paths(tmp_path):
    out = ("--out", tmp_path / "out")
    assert "No such file" in refusal(run, tmp_path / "a.txt", *out)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("x")
    message = refusal(run, tmp_path / "in", *out)
    assert f"nothing to read in this folder (left out: 1 of unknown extension ({tmp_path / 'in/a.csv'})), " in message
    (tmp_path / "a.json.gz").write_text("x")
    assert "unknown extension, expected .txt, .jsonl or .parquet" in refusal(run, tmp_path / "a.json.gz", *out)
    (tmp_path / "in/a.parquet.gz").write_text("x")
    assert "unpack it first" in refusal(run, tmp_path / "in", *out)
    assert "not a file" in refusal(run, "/dev/null", *out)
    (tmp_path / "b.txt").write_text("some text")
    assert "exists already, expected the name of a new" in refusal(run, tmp_path / "b.txt", "--out", tmp_path / "b.txt")
    assert "cannot write there" in refusal(run, tmp_path / "b.txt", "--out", tmp_path / "b.txt" / "out")
    assert not (tmp_path / "out").exists()


def test_text_without_a_place_to_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", 10)
    monkeypatch.setattr(prepare_batches, "LONGEST_RUN", 100)
    path = tmp_path / "a.txt"
    path.write_text("a b" + "x" * 95 + " " * 5 + "yz")
    run(path, "--out", tmp_path / "out")
    path.write_text("a b" + "x" * 105)
    assert "have no place to cut them without changing a token" in refusal(run, path, "--out", tmp_path / "out2")


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    assert "1 tokens for validation, expected at least 2" in refusal(run, tmp_path / "a.txt", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_threads_were_processes():
    assert parse(["a.txt", "--out", "b", "--processes", "3"]).threads == 3


@pytest.mark.parametrize("arguments", ["--shard-tokens 1", "--val-percent 100", "--threads 0", "--name a/b"])
def test_bad_options(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(["a.txt", "--out", "b", *arguments.split()])
    assert "expected" in capsys.readouterr().err


MEASURED = """
import re, sys
from scripts import prepare
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
before = most()
code = prepare.main(sys.argv[1:])
print("MiB:", most() - before)
sys.exit(code)
"""


def test_more_text_than_memory(tmp_path):
    """Two documents of 40 MB, plain and packed; all that reading, tokenizing and writing them takes is less."""
    block = nonsense(300_000).encode()
    count = 40_000_000 // len(block)
    for name, part in (("a.txt", block), ("b.txt.gz", gzip.compress(block, 1))):
        with open(tmp_path / name, "wb") as file:
            file.writelines([part] * count)
    arguments = [tmp_path, "--out", tmp_path / "out", "--tokenizer", "bytes", "--threads", "1"]
    result = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.rpartition("MiB: ")[2]) < 38
    assert len(tokens_in(tmp_path / "out", "train")) > 70_000_000
