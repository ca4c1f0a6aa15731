"""scripts/prepare.py: interrupted at any moment, given a folder again, and in several processes."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from gpt2.errors import UserError
from scripts import prepare as prepare_script
from scripts.cluster.hosts import child_processes
from scripts.preparation import batches as prepare_batches
from scripts.preparation import manifest as prepare_manifest
from scripts.preparation import processes as prepare_processes
from scripts.preparation import shards as prepare_shards
from tests.suites.faults.processes import is_zombie, wait_until
from tests.support.prepared import command, contents, manifest_of, nonsense, run, use_vocabulary, write_folder
from tests.unit.test_tokenizers import needs_vocabulary, refusal

LIMIT_S = 60


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
    [(prepare_shards.ShardWriter, "add"), (prepare_shards.os, "replace"), (prepare_shards, "checksum")],
)
def test_interrupted_at_any_moment(tmp_path, monkeypatch, made, module, name, before):
    folder, whole = made
    for after in range(100):
        out = tmp_path / str(after)
        with monkeypatch.context() as patch:
            at_call(patch, module, name, after, interrupt, before)
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
    text = (folder / "001.txt").read_bytes()
    (folder / "001.txt").write_bytes(b"?" * len(text))
    assert f"made of {tmp_path / 'in/001.txt'} with other contents" in refusal(run, folder, *flags, "--name", "in")
    (folder / "001.txt").unlink()
    assert "made of 5 files, these are 4" in refusal(run, folder, *flags, "--name", "in")
    prepare_manifest.check_read_alike(out, {"shards": [], "reading": 1})  # without shards it is begun again
    with pytest.raises(UserError, match="begun by another version, which reads text in another way"):
        prepare_manifest.check_read_alike(out, {"shards": [{}], "reading": prepare_manifest.READING - 1})
    (out / "manifest.json").write_text('{"format": "gpt2-mpi shards 2"}')
    assert "its format is 'gpt2-mpi shards 2', expected 'gpt2-mpi shards 1': give" in refusal(run, folder, *flags)
    (out / "manifest.json").write_text("{}")
    assert "not a manifest of prepare.py" in refusal(run, folder, *flags)
    (out / "manifest.json").unlink()
    assert "holds in_train_000000.bin but no manifest.json" in refusal(run, folder, *flags)


@needs_vocabulary
def test_a_folder_of_another_tokenizer(made, monkeypatch):
    use_vocabulary(monkeypatch)
    folder, out = made
    message = refusal(lambda: run(folder, "--out", out, tokenizer="gpt2"))
    assert "made with --tokenizer bytes, this is gpt2: give another --out, or remove the folder" in message


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more text")


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"a", b"c"))


# In the first reading, between it and the checksum, between the two readings, in the second with shards written.
MOMENTS = [(prepare_batches, "find_cut", 45), (prepare_manifest, "checksum", 2), (prepare_script, "write_shards", 0)]
MOMENTS += [(prepare_shards.ShardWriter, "add", 9)]


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
    assert message.startswith(f"{path}: {path.stat().st_size} bytes, written to at ")
    assert f"expected the {size} bytes of " in message
    assert not list(out.iterdir())
    make(folder, out)
    make(folder, tmp_path / "new")
    assert contents(out) == contents(tmp_path / "new")


def test_a_change_that_looks_like_damage(tmp_path, monkeypatch):
    """That it is not UTF-8 any more would not help who waits for the file to be complete."""
    path = tmp_path / "text.txt"
    path.write_text(nonsense(900))
    os.utime(path, ns=(0, 0))
    at_call(monkeypatch, prepare_script, "write_shards", 0, lambda: path.write_bytes(b"\xff"))
    assert refusal(make, path, tmp_path / "out").startswith(f"{path}: 1 bytes, written to at ")


def test_shards_of_before_stay_when_an_input_changes(tmp_path, monkeypatch, made):
    folder, out = made
    expected = contents(out)
    (out / "in_train_000002.bin").unlink()
    with monkeypatch.context() as patch:
        at_call(patch, prepare_shards.ShardWriter, "add", 5, partial(os.utime, folder / "003.txt"))
        assert "as at the start" in refusal(make, folder, out)
    assert len(manifest_of(out)["shards"]) == 2
    assert {name for name in contents(out) if "0.bin" in name or "1.bin" in name} >= {"in_train_000001.bin"}
    make(folder, out)
    assert contents(out) == expected


def test_a_changed_input_in_several_processes(tmp_path, long_text):
    """One line also where another process has noticed it."""
    path = tmp_path / "growing.txt"
    path.write_bytes(long_text.read_bytes())
    process = subprocess.Popen(command(path, "--out", tmp_path / "out", "--processes", 2), stderr=subprocess.PIPE)
    assert wait_until(lambda: (tmp_path / "out").exists() or process.poll() is not None, LIMIT_S)
    while process.poll() is None:
        grow(path)
        time.sleep(0.001)
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.returncode == 2
    assert errors.startswith(f"prepare.py: error: {path}: ")
    assert errors.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


def test_two_at_once(made):
    folder, out = made
    with prepare_manifest.owned_folder(out):
        assert "another prepare.py is writing there" in refusal(make, folder, out)


def test_full_disk(made, tmp_path, monkeypatch):
    folder, whole = made
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(prepare_shards, "open", lambda path, mode: open("/dev/full", "wb"), raising=False)  # noqa: SIM115
        assert "No space left on device: cannot write it: make room" in refusal(make, folder, out)
    assert not list(out.glob("*.part"))
    make(folder, out)
    assert contents(out) == contents(whole)


def test_nothing_is_written_through_links(made, tmp_path):
    """Not through one of an unfinished shard's name. What a shard's own name leads to must be a file."""
    folder, whole = made
    out = tmp_path / "out"
    kept = tmp_path / "kept"
    out.mkdir()
    kept.write_text("kept")
    (out / "in_train_000000.bin.part").symlink_to(kept)
    make(folder, out)
    assert contents(out) == contents(whole)
    assert kept.read_text() == "kept"
    (out / "in_train_000000.bin").unlink()
    os.mkfifo(out / "in_train_000000.bin")
    assert "in_train_000000.bin: a named pipe, expected a regular file" in refusal(make, folder, out)
    assert (out / "in_train_000000.bin").is_fifo()


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
        assert wait_until(lambda pid=process.pid: child_processes(pid) and list(out.glob("*.bin*")), LIMIT_S)
        workers = child_processes(process.pid)
        if number:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        if number == signal.SIGTERM:
            assert errors.decode() == "prepare.py: interrupted: the same command goes on from the last complete shard\n"
        assert process.returncode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75, None: 0}[number]
        assert wait_until(lambda workers=workers: all(map(is_zombie, workers)), LIMIT_S)
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


def test_an_error_in_another_process(tmp_path, long_text):
    folder = write_folder(tmp_path / "in", ["fine", "fine"])
    (folder / "001.txt").write_bytes(b"\xff")
    result = subprocess.run(
        command(folder, "--out", tmp_path / "out", "--processes", 2), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"prepare.py: error: {folder / '001.txt'}: byte 0 (0xff) is not UTF-8")
    assert result.stderr.count("\n") == 1
