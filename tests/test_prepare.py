"""scripts/prepare.py: the tokens of gpt2.texts, whatever they come from, in how many processes, and if interrupted."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_tokenizers import CACHE, SHAKESPEARE, needs_vocabulary, refusal

from gpt2 import texts
from gpt2.shards import open_shard

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import prepare_batches  # noqa: E402 (found in scripts/)
import prepare_documents  # noqa: E402
import prepare_files  # noqa: E402
import prepare_manifest  # noqa: E402
import prepare_processes  # noqa: E402
import prepare_shards  # noqa: E402
from prepare import parse, prepare  # noqa: E402

TOKENIZERS = ["bytes", pytest.param("gpt2", marks=needs_vocabulary)]
# What GPT-2's pattern and Python disagree about, or treats on its own: contractions, kinds of white space, no letters.
FRAGMENTS = ["a", "b c", "'ll", "'s", "'", "1", "23", "é", "字", "字。", "🙂", "<|endoftext|>", ".", "!?"]
FRAGMENTS += [" ", "  ", "\t", "\n", "\r\n", "\n\n\n", "\x1c", "\x85", "\xa0", "\u2028", "\u3000"]
DOCUMENTS = ["First line.\n second", "", "é'll 字。\n\n  x", " ", "\n", "last <|endoftext|> one\r\n" * 9]


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch):
    if CACHE.is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))


def nonsense(length: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(FRAGMENTS, k=length))


def run(*arguments, tokenizer="bytes", processes=1) -> None:
    """prepare.py in this process."""
    prepare(parse([*map(str, arguments), "--tokenizer", tokenizer, "--processes", str(processes)]))


def command(*arguments) -> list[str]:
    return [sys.executable, str(SCRIPTS / "prepare.py"), *map(str, arguments), "--tokenizer", "bytes"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens_in(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([open_shard(path) for path in sorted(folder.glob(f"*_{split}_*.bin"))])


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def write_jsonl(path: Path, documents, field="text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n\n" for text in documents))
    return path


def write_folder(path: Path, documents) -> Path:
    path.mkdir()
    for number, document in enumerate(documents):
        (path / f"{number:03}.txt").write_bytes(document.encode())
    return path


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


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("batch", [1, 7, 100, 1 << 18])
def test_tokens_are_those_of_text(tmp_path, monkeypatch, tokenizer, batch):
    """A folder, cut into batches of any size: the very shards of train.py --text, the border inside a document."""
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", batch)
    folder = write_folder(tmp_path / "texts", [nonsense(300), *(nonsense(9, seed) for seed in range(99))])
    run(folder, "--out", tmp_path / "out", tokenizer=tokenizer)
    expected = texts.prepare(folder, tokenizer, tmp_path)
    for split, path in zip(("train", "val"), expected, strict=True):
        assert (tmp_path / f"out/texts_{split}_000000.bin").read_bytes() == path.read_bytes()
    found = list(prepare_batches.read_pieces(prepare_files.file_of(folder / "000.txt"), "text"))
    assert (len(found) > 1) == (batch <= 100)


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
def test_packed(tmp_path, kind, packing):
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
        assert f"{path}: the {'gzip' if packing == '.gz' else 'zstd'} file is " in refusal(
            run, path, "--out", tmp_path / "b"
        )


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
    assert (
        tokens_in(tmp_path / "out", "train").astype(np.uint8).tobytes() == "\n".join(filter(None, documents)).encode()
    )
    assert manifest_of(tmp_path / "out")["inputs"][0]["empty_documents"] == 2
    run(path, "--out", tmp_path / "again", "--val-percent", 0, "--shard-tokens", 100)
    assert np.array_equal(tokens_in(tmp_path / "again", "train"), tokens_in(tmp_path / "out", "train"))


def test_bad_parquet(tmp_path, parquet, monkeypatch):
    path, out = parquet(tmp_path / "a.parquet", id=[1, 2], body=["a", "b"]), ("--out", tmp_path / "out")
    assert "holds 'id', 'body', expected a column 'text'" in refusal(run, path, *out)
    assert "column 'id' is int64, expected text" in refusal(run, path, *out, "--field", "id")
    path.write_bytes(path.read_bytes()[:-5])
    assert "cannot be read as Parquet" in refusal(run, path, *out)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal(run, path, *out).endswith("needs the package pyarrow: pip install pyarrow")


def test_missing_zstandard(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"?")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "needs the package zstandard" in refusal(run, tmp_path / "a.txt.zst", "--out", tmp_path / "out")


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
    assert not list((tmp_path / "out").iterdir())


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
    assert "unknown extension, expected .txt, .jsonl or .parquet" in refusal(run, tmp_path / "in/a.csv", *out)
    assert "nothing to read in this folder" in refusal(run, tmp_path / "in", *out)
    (tmp_path / "in/a.parquet.gz").write_text("x")
    assert "unpack it first" in refusal(run, tmp_path / "in", *out)
    assert "not a file" in refusal(run, "/dev/null", *out)
    (tmp_path / "b.txt").write_text("some text")
    assert "cannot write there" in refusal(run, tmp_path / "b.txt", "--out", tmp_path / "b.txt")
    assert not (tmp_path / "out").exists()


def test_text_without_a_place_to_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", 10)
    monkeypatch.setattr(prepare_batches, "LONGEST_RUN", 100)
    path = tmp_path / "a.txt"
    path.write_text("a b" + "x" * 95 + " " * 5 + "yz")
    run(path, "--out", tmp_path / "out")
    path.write_text("a b" + "x" * 105)
    assert "hold neither a space nor a line break" in refusal(run, path, "--out", tmp_path / "out2")


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    assert "1 tokens for validation, expected at least 2" in refusal(run, tmp_path / "a.txt", "--out", tmp_path / "out")
    assert not manifest_of(tmp_path / "out")["complete"]


@pytest.mark.parametrize("arguments", ["--shard-tokens 1", "--val-percent 100", "--processes 0", "--name a/b"])
def test_bad_options(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(["a.txt", "--out", "b", *arguments.split()])
    assert "expected" in capsys.readouterr().err


def make(folder: Path, out: Path) -> None:
    run(folder, "--out", out, "--shard-tokens", 150)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder of documents, and what becomes of it: shards that end within batches, and batches within shards."""
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", 97)
    folder = write_folder(tmp_path / "in", [*(nonsense(90, seed) for seed in range(4)), ""])
    make(folder, tmp_path / "whole")
    return folder, tmp_path / "whole"


class Interruption(Exception):
    pass


def interrupt(monkeypatch, module, name: str, after: int, before: bool) -> None:
    """The function of that name raises Interruption when it is called for the (after + 1)-th time, or after that."""
    function, calls = getattr(module, name), []

    def interrupted(*arguments):
        calls.append(name)
        if before and len(calls) > after:
            raise Interruption
        result = function(*arguments)
        if len(calls) > after:
            raise Interruption
        return result

    monkeypatch.setattr(module, name, interrupted)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("module", "name"),
    [(prepare_shards.ShardWriter, "add"), (prepare_shards.os, "replace"), (prepare_shards, "checksum")],
)
def test_interrupted_at_any_moment(tmp_path, monkeypatch, made, module, name, before):
    folder, whole = made
    for after in range(100):
        out = tmp_path / str(after)
        with monkeypatch.context() as patch:
            interrupt(patch, module, name, after, before)
            try:
                make(folder, out)
            except Interruption:
                pass
            else:
                break
        manifest = out / "manifest.json"
        complete = [shard["file"] for shard in manifest_of(out)["shards"]] if manifest.exists() else []
        written = {name: (out / name).stat().st_mtime_ns for name in complete}
        make(folder, out)
        assert contents(out) == contents(whole)
        assert written == {name: (out / name).stat().st_mtime_ns for name in complete}  # not a second time
    assert after >= 7  # shards


def test_a_damaged_shard_is_made_again(made, capsys):
    folder, out = made
    expected = contents(out)
    make(folder, out)
    assert "complete already" in capsys.readouterr().out
    shard = out / "in_train_000002.bin"
    shard.write_bytes(expected[shard.name][:-1] + b"?")
    (out / "in_train_000004.bin").unlink()
    make(folder, out)
    assert contents(out) == expected


def test_a_folder_of_other_shards(tmp_path, made):
    folder, out = made
    flags = ("--out", out, "--shard-tokens", 150)
    assert "made with --shard-tokens 150, this is 151" in refusal(run, folder, "--out", out, "--shard-tokens", 151)
    assert "made with --val-percent 10.0, this is 5.0" in refusal(run, folder, *flags, "--val-percent", 5)
    folder = folder.rename(tmp_path / "moved")
    run(folder, *flags, "--name", "in")  # the same text
    (folder / "001.txt").write_text("other text")
    assert f"made of {tmp_path / 'in/001.txt'} with other contents" in refusal(run, folder, *flags, "--name", "in")
    (folder / "001.txt").unlink()
    assert "made of 5 files, these are 4" in refusal(run, folder, *flags, "--name", "in")
    (out / "manifest.json").write_text("{}")
    assert "not a manifest of prepare.py" in refusal(run, folder, *flags)
    (out / "manifest.json").unlink()
    assert "holds in_train_000000.bin but no manifest.json" in refusal(run, folder, *flags)


@needs_vocabulary
def test_a_folder_of_another_tokenizer(made):
    folder, out = made
    message = refusal(lambda: run(folder, "--out", out, "--shard-tokens", 150, tokenizer="gpt2"))
    assert "made with --tokenizer bytes, this is gpt2: give another --out, or remove the folder" in message


def test_two_at_once(made):
    folder, out = made
    with prepare_manifest.owned_folder(out):
        assert "another prepare.py is writing there" in refusal(make, folder, out)


def test_full_disk(made, tmp_path):
    folder, whole = made
    out = tmp_path / "out"
    out.mkdir()
    (out / "in_train_000000.bin.part").symlink_to("/dev/full")
    assert "No space left on device: cannot write it: make room" in refusal(make, folder, out)
    assert not list(out.glob("*.part"))
    make(folder, out)
    assert contents(out) == contents(whole)


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "long.txt"
    path.write_text(nonsense(400_000) * 4)
    return path


def test_processes(tmp_path, long_text):
    """The same files from 1 and 3 processes, though those go on after a SIGKILL and a SIGTERM: none is left behind."""
    options = ["--shard-tokens", 1_000_000]
    run(long_text, "--out", tmp_path / "one", *options)
    out = tmp_path / "three"
    for number in (signal.SIGKILL, signal.SIGTERM, None):
        flags = ["--out", out, "--processes", 2 if number else 3, *options]
        process = subprocess.Popen(command(long_text, *flags), stderr=subprocess.PIPE)
        wait_until(lambda process=process: children(process.pid) and list(out.glob("*.bin*")))
        workers = children(process.pid)
        if number:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        if number == signal.SIGTERM:
            assert errors.decode() == "prepare.py: interrupted: the same command goes on from the last complete shard\n"
        assert process.returncode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75, None: 0}[number]
        wait_until(lambda workers=workers: not any(map(is_running, workers)))
    assert contents(out) == contents(tmp_path / "one")
    assert len(contents(out)) > 5


def slow_square(number: int) -> int:
    time.sleep(0.05 if number == 3 else 0)
    if number == 17:
        raise ValueError("seventeen")
    if number == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_ordered_map():
    """In order though the fourth takes longest, not far ahead; errors at their turn; a process that is killed."""
    taken = []
    with prepare_processes.ordered_map(2) as mapped:
        results = mapped(slow_square, (taken.append(number) or number for number in range(17)))
        assert [next(results) for _ in range(4)] == [0, 1, 4, 9]
        assert len(taken) <= 4 + 8
        assert list(results) == [number * number for number in range(4, 17)]
        assert list(mapped(slow_square, [])) == []
        with pytest.raises(ValueError, match="seventeen"):
            list(mapped(slow_square, [17]))
        message = refusal(lambda: list(mapped(slow_square, range(40, 60))))
        assert message.startswith("a process was ended from outside")
    assert not multiprocessing.active_children()


def children(process: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
    except OSError:
        return []


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_an_error_in_another_process(tmp_path, long_text):
    folder = write_folder(tmp_path / "in", ["fine", "fine"])
    (folder / "001.txt").write_bytes(b"\xff")
    result = subprocess.run(
        command(folder, "--out", tmp_path / "out", "--processes", 2), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"prepare.py: error: {folder / '001.txt'}: byte 0 (0xff) is not UTF-8")
    assert result.stderr.count("\n") == 1


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv.pop(1))
import prepare
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 24 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (size, size))
sys.exit(prepare.main(sys.argv[1:]))
"""


def test_more_text_than_memory(tmp_path):
    """Two documents of 40 MB, plain and packed; 24 MB for all that reading, tokenizing and writing them takes."""
    block = nonsense(300_000).encode()
    count = 40_000_000 // len(block)
    for name, part in (("a.txt", block), ("b.txt.gz", gzip.compress(block, 1))):
        with open(tmp_path / name, "wb") as file:
            file.writelines([part] * count)
    arguments = [str(SCRIPTS), tmp_path, "--out", tmp_path / "out", "--tokenizer", "bytes", "--processes", "1"]
    result = subprocess.run([sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(tokens_in(tmp_path / "out", "train")) > 70_000_000
