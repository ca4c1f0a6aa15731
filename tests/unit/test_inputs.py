"""The files of text that prepare.py, --text and evaluate.py find, which of them they leave out, and their encodings."""

import codecs
import gzip
import os

import numpy as np
import pytest

from gpt2.data import inputs as text_inputs
from gpt2.data import texts
from gpt2.data.shards import open_shard
from gpt2.data.texts import read_documents
from tests.support.prepared import run, tokens_in, write_jsonl
from tests.support.refusal import refusal


def text_of(*paths) -> str:
    """Of shards of bytes."""
    return np.concatenate([open_shard(path)[:] for path in paths]).astype(np.uint8).tobytes().decode()


@pytest.fixture
def corpus(tmp_path):
    """A folder with something of everything; what is to be read of it holds the letters a to e."""
    folder, beside = tmp_path / "corpus", tmp_path / "beside"
    for path in (folder / "sub", folder / ".git", beside):
        path.mkdir(parents=True)
    (folder / "1.TXT").write_text("a" * 20)
    (folder / "sub" / "2.txt.gz").write_bytes(gzip.compress(b"b" * 20))
    (folder / "z.Jsonl").write_text('{"text": "' + "c" * 20 + '"}\n')
    (beside / "4.txt").write_text("d" * 20)
    (folder / "linked").symlink_to(beside)
    (folder / "link.txt").symlink_to(tmp_path / "one.csv")
    (tmp_path / "one.csv").write_text("e" * 20)
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    for path in (folder / ".git" / "x.txt", folder / ".x.txt", folder / "notes.csv", folder / "no-extension"):
        path.write_text("z")
    (folder / "empty.txt").write_text("")
    (folder / "empty.jsonl").write_text("\n\n")
    os.mkfifo(folder / "pipe.txt")
    return folder


def test_all_programs_read_the_same_files_and_name_the_others(tmp_path, corpus, capsys):
    run(corpus, "--out", tmp_path / "out")
    (line,) = capsys.readouterr().err.splitlines()
    remarks = []
    shards = texts.prepare(corpus, "bytes", tmp_path, remark=remarks.append)
    assert remarks == [line]
    for part in (
        f"2 hidden ({corpus}/.git, {corpus}/.x.txt)",
        f"2 of unknown extension ({corpus}/no-extension, {corpus}/notes.csv)",
        f"2 a link to nothing ({corpus}/gone, {corpus}/gone.txt)",
        f"1 not a file ({corpus}/pipe.txt)",
        f"1 read already under another name ({corpus}/sub/loop)",
        f"2 without text ({corpus}/empty.jsonl, {corpus}/empty.txt)",
    ):
        assert part in line
    assert text_of(*shards).replace("\n", "") == "".join(20 * letter for letter in "aedbc")
    for split, path in zip(("train", "val"), shards, strict=True):
        assert np.array_equal(tokens_in(tmp_path / "out", split), open_shard(path)[:])


def test_a_file_that_is_read_twice_is_named(tmp_path):
    """Given twice, or by a link. It is read each time, as it may be meant to count twice."""
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("a.txt")
    found, remarks = text_inputs.find_inputs([tmp_path, tmp_path / "a.txt"])
    assert len(found) == 3
    assert str(remarks) == f"read again: 2 given or linked more than once ({tmp_path}/b.txt, {tmp_path}/a.txt)"


def test_a_file_of_any_name_may_be_given(tmp_path, capsys):
    """It is plain text. A line says so."""
    path = tmp_path / "notes.md"
    path.write_text("some text" * 9)
    run(path, "--out", tmp_path / "out")
    assert capsys.readouterr().err == f"read as plain text: 1 of unknown extension ({path})\n"
    assert read_documents(path)[0] == ["some text" * 9]


def test_names_stay_on_one_line(tmp_path):
    (tmp_path / "a\nb.csv").write_text("x")
    (tmp_path / "c.txt").write_text("x")
    assert str(text_inputs.find_inputs([tmp_path])[1]) == f"left out: 1 of unknown extension ({tmp_path}/a?b.csv)"
    for number in range(9):
        (tmp_path / f"{number}.csv").write_text("x")
    named = f"({tmp_path}/0.csv, {tmp_path}/1.csv, {tmp_path}/2.csv, ...)"
    assert str(text_inputs.find_inputs([tmp_path])[1]) == f"left out: 10 of unknown extension {named}"


@pytest.mark.parametrize("block", [1, 2, 1 << 20])
@pytest.mark.parametrize("packing", [".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_byte_order_mark_is_skipped(tmp_path, monkeypatch, packing, block):
    """That at the beginning. A second one is text; in .jsonl, files with a mark may have been joined."""
    monkeypatch.setattr(text_inputs, "BLOCK_BYTES", block)
    path, content = tmp_path / f"a{packing}", codecs.BOM_UTF8 + "\ufefftext".encode()
    if "jsonl" in packing:
        content = 2 * (codecs.BOM_UTF8 + write_jsonl(tmp_path / "lines", ["text"]).read_bytes())
    pack = bytes
    if packing.endswith(".zst"):
        pack = pytest.importorskip("zstandard", reason="no zstandard: pip install zstandard").ZstdCompressor().compress
    path.write_bytes(gzip.compress(content) if packing.endswith(".gz") else pack(content))
    expected = ["text", "text"] if "jsonl" in packing else ["\ufefftext"]
    assert read_documents(path)[0] == expected
    run(path, "--out", tmp_path / "out", "--val-percent", 0)
    assert tokens_in(tmp_path / "out", "train").astype(np.uint8).tobytes().decode() == "\n".join(expected)


def test_a_byte_order_mark_alone_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8)
    assert "no text in it" in refusal(read_documents, tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"ab\xff")
    assert "a.txt: byte 5 (0xff) is not UTF-8" in refusal(read_documents, tmp_path / "a.txt")


@pytest.mark.parametrize("extension", ["txt", "jsonl"])
@pytest.mark.parametrize(
    ("encoding", "name"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE"), ("utf-32", "UTF-32")],
)
def test_other_unicode_is_named(tmp_path, monkeypatch, encoding, name, extension):
    monkeypatch.setattr(text_inputs, "BLOCK_BYTES", 3)
    path = tmp_path / f"a.{extension}"
    path.write_bytes(('{"text": "naïve 字"}\n' * 5).encode(encoding))
    message = f"{path}: {name} text, expected UTF-8: convert the file with iconv -f {name} -t UTF-8"
    assert refusal(read_documents, path) == message
    assert refusal(run, path, "--out", tmp_path / "out") == message


def test_zeros_alone_make_no_utf16(tmp_path):
    for content in (b"\0\0", b"a\0bc" * 300):
        (tmp_path / "a.txt").write_bytes(content)
        assert read_documents(tmp_path / "a.txt")[0] == [content.decode()]
