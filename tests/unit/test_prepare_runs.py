"""scripts/prepare.py: interrupted at any moment, given a folder that exists, and with several threads."""

import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from gpt2.data.shards import open_shard
from gpt2.data.tokenizers import load_tokenizer
from gpt2.errors import UserError
from scripts import prepare as prepare_script
from scripts.preparation import batches as prepare_batches
from scripts.preparation import manifest as prepare_manifest
from scripts.preparation import shards as prepare_shards
from scripts.preparation.countdown import countdown
from tests.suites.faults.processes import wait_until
from tests.support.prepared import command, contents, manifest_of, nonsense, run, write_folder
from tests.support.refusal import refusal

LIMIT_S = 60


def make(folder: Path, out: Path, **options) -> None:
    run(folder, "--out", out, "--shard-tokens", 150, **options)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder of documents, and what becomes of it: shards that end within batches, and batches within shards."""
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", 97)
    folder = write_folder(tmp_path / "in", [*(nonsense(90, seed) for seed in range(4)), ""])
    make(folder, tmp_path / "whole")
    return folder, tmp_path / "whole"


class Interruption(Exception):
    pass


def interrupt():
    raise Interruption


def at_call(monkeypatch, module, name: str, number: int, act, before: bool = True) -> None:
    """act() is called before or after that call of the function, counted from 0."""
    function = getattr(module, name)
    numbers = itertools.count()

    def watched(*arguments):
        is_now = next(numbers) == number
        if is_now and before:
            act()
        result = function(*arguments)
        if is_now and not before:
            act()
        return result

    monkeypatch.setattr(module, name, watched)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("module", "name"),
    [(prepare_script, "tokenize"), (prepare_shards, "write_shard"), (prepare_shards, "checksum"), (os, "rename")],
)
def test_interrupted_at_any_moment(tmp_path, monkeypatch, made, module, name, before):
    """The folder is complete or not there, and nothing else is left."""
    folder, whole = made
    for after in range(100):
        out = tmp_path / "out"
        with monkeypatch.context() as patch:
            at_call(patch, module, name, after, interrupt, before)
            try:
                make(folder, out)
            except Interruption:
                assert {path.name for path in tmp_path.iterdir()} - {"in", "whole"} <= {"out"}
                assert not out.exists() or name == "rename"
            else:
                break
        if not out.exists():
            make(folder, out)
        assert contents(out) == contents(whole)
        shutil.rmtree(out)
    assert after >= (1 if name == "rename" else 7)  # shards


def test_shards_are_full(made):
    """Each but the last of a split, as their manifest says."""
    _, out = made
    shards = manifest_of(out)["shards"]
    assert [shard["tokens"] for shard in shards] == [len(open_shard(out / shard["file"])) for shard in shards]
    for split in ("train", "val"):
        *full, last = [shard["tokens"] for shard in shards if shard["split"] == split]
        assert set(full) <= {150}
        assert 0 < last <= 150
    assert len(shards) >= 7


def test_a_folder_that_exists(made):
    folder, out = made
    expected = contents(out)
    assert f"{out}: exists already, expected the name of a new folder" in refusal(make, folder, out)
    assert contents(out) == expected


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more text")


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"a", b"c"))


# In the first reading, between it and the checksum, between the two readings, in the second with shards written.
MOMENTS = [(prepare_batches, "find_cut", 45), (prepare_manifest, "checksum", 2), (prepare_script, "write_shards", 0)]
MOMENTS += [(prepare_script, "tokenize", 9)]


@pytest.mark.parametrize("change", [grow, rewrite])
@pytest.mark.parametrize(("module", "name", "after"), MOMENTS)
def test_an_input_that_changes_while_it_is_read(tmp_path, monkeypatch, module, name, after, change):
    """It is refused, and nothing made of it stays: the same command then takes what is there."""
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", 97)
    folder = write_folder(tmp_path / "in", [*(nonsense(900, seed) for seed in range(3))])
    path = folder / "002.txt"
    out = tmp_path / "out"
    function = getattr(module, name)
    os.utime(path, ns=(0, 0))  # it is old, so that a change is another time however coarse the clock
    size = path.stat().st_size
    with monkeypatch.context() as patch:
        if name in ("find_cut", "checksum"):  # hours before the second reading would come to it
            patch.delattr(prepare_script, "write_shards")
        at_call(patch, module, name, after, partial(change, path))
        message = refusal(make, folder, out)
    assert getattr(module, name) is function
    assert message.startswith(f"{path}: {path.stat().st_size} bytes, written to meanwhile")
    assert f"expected the {size} bytes that were there" in message
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    make(folder, out)
    make(folder, tmp_path / "new")
    assert contents(out) == contents(tmp_path / "new")


def test_a_change_that_looks_like_damage(tmp_path, monkeypatch):
    """That it is not UTF-8 any more would not help who waits for the file to be complete."""
    path = tmp_path / "text.txt"
    path.write_text(nonsense(900))
    os.utime(path, ns=(0, 0))
    at_call(monkeypatch, prepare_script, "write_shards", 0, lambda: path.write_bytes(b"\xff"))
    assert refusal(make, path, tmp_path / "out").startswith(f"{path}: 1 bytes, written to meanwhile")


def test_a_changed_input_in_several_threads(tmp_path, long_text):
    """One line also where the other threads have work."""
    path = tmp_path / "growing.txt"
    path.write_bytes(long_text.read_bytes())
    process = subprocess.Popen(command(path, "--out", tmp_path / "out", "--threads", 2), stderr=subprocess.PIPE)
    assert wait_until(lambda: list(tmp_path.glob(".*.tmp")) or process.poll() is not None, LIMIT_S)
    while process.poll() is None:
        grow(path)
        time.sleep(0.001)
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.returncode == 2
    assert errors.startswith(f"prepare.py: error: {path}: ")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_appears_meanwhile(made, tmp_path, monkeypatch):
    """As from another prepare.py with the same --out: the first that is complete stays."""
    folder, whole = made
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        at_call(patch, prepare_script, "check_enough", 0, partial(shutil.copytree, whole, out))
        assert refusal(make, folder, out).startswith(f"{out}: Directory not empty")
    assert contents(out) == contents(whole)


def test_full_disk(made, tmp_path, monkeypatch):
    folder, whole = made
    out = tmp_path / "out"

    def write(path, parts):
        with open("/dev/full", "wb", buffering=0) as file:
            file.writelines(parts)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_shards, "write_shard", write)
        assert refusal(make, folder, out).startswith(f"{out}: No space left on device: cannot write it: ")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "whole"}
    make(folder, out)
    assert contents(out) == contents(whole)


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "long.txt"
    path.write_text(nonsense(400_000) * 4)
    return path


def test_threads(tmp_path, long_text):
    """The same files from 1 and 3 threads, though a SIGTERM and a SIGKILL ended the same command before."""
    options = ["--shard-tokens", 1_000_000]
    run(long_text, "--out", tmp_path / "one", *options)
    out = tmp_path / "three"
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        flags = ["--out", out, "--threads", 3, *options]
        process = subprocess.Popen(command(long_text, *flags), stderr=subprocess.PIPE)
        assert wait_until(lambda: list(tmp_path.glob(".*.tmp/*.bin")), LIMIT_S)
        if number:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == {signal.SIGTERM: 75, signal.SIGKILL: -signal.SIGKILL, None: 0}[number]
        left = len(list(tmp_path.glob(".*.tmp")))
        assert left == (number != signal.SIGTERM)
        if number == signal.SIGTERM:
            assert errors.decode().splitlines()[1:] == ["prepare.py: interrupted: nothing is written, start again"]
        assert out.exists() == (number is None)
    assert contents(out) == contents(tmp_path / "one")
    assert len(contents(out)) > 5


def test_batches_in_threads(monkeypatch):
    """Results keep the order of the batches, few batches wait, and an error is raised in its batch's turn."""
    encoding = load_tokenizer("bytes")
    taken = []
    threads = set()

    def slow(batch, encoding):
        threads.add(threading.current_thread())
        time.sleep(0.1 if batch.characters == 0 else 0.001)
        if batch.characters == 17:
            raise UserError("seventeen")
        return batch.characters

    def work(count):
        for number in range(count):
            taken.append(number)
            yield prepare_batches.Batch("train", [], number)

    monkeypatch.setattr(prepare_script, "tokenize", slow)
    with countdown("tokenizing", "characters", 1) as advance:
        results = prepare_script.tokenize_all(work(17), encoding, 2, advance)
        assert [next(results) for _ in range(4)] == [("train", number) for number in range(4)]
        assert len(taken) <= 4 + 2 * prepare_script.AHEAD
        assert [tokens for _, tokens in results] == list(range(4, 17))
        assert len(threads) == 2
        assert list(prepare_script.tokenize_all(work(0), encoding, 2, advance)) == []
        assert refusal(list, prepare_script.tokenize_all(work(30), encoding, 2, advance)) == "seventeen"
