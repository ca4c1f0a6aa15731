"""The files of a checkpoint: what was written is read by any other cut, and nothing else is ever read."""

import shutil
from itertools import pairwise

import numpy as np
import pytest

from dist.ranges import divide_among_holders
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.formats import checkpoint_files, checkpoints, weights
from gpt2.formats.checkpoints import Checkpoint
from gpt2.parameters import Layout, Parameters

CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=5, context=8, vocab_size=11)
LAYOUT = Layout(CONFIG, multiple_of=64)
COUNT = LAYOUT.count


@pytest.fixture
def arrays(monkeypatch):
    """What is saved; ranges are short, so that a part of the model is many of them."""
    monkeypatch.setattr(checkpoint_files, "LONGEST", 100)
    random = np.random.default_rng(7)
    return {name: random.standard_normal(COUNT).astype(np.float32) for name in checkpoints.STATE}


def write_parts(folder, arrays, step=7, cuts=(0, 333, 334, COUNT), run="c" * 32):
    """What `complete` is to be given of a checkpoint by one rank a cut."""
    folder.mkdir(exist_ok=True)
    part, files = folder / f"{checkpoints.folder_name(step)}.part", {}
    for rank, (start, stop) in enumerate(pairwise(cuts)):
        ranges = [(name, start, values[start:stop]) for name, values in arrays.items()]
        files[checkpoint_files.rank_file(rank)] = checkpoint_files.write_part(part, step, rank, ranges, run)
    facts = {"run": run, "step": step, "updates": step} | checkpoints.model_facts(LAYOUT)
    return part, facts, files


def write(folder, arrays, **options):
    return checkpoints.complete(*write_parts(folder, arrays, **options))


def test_any_range_is_read_from_any_cut(tmp_path, arrays):
    checkpoint = Checkpoint(write(tmp_path, arrays))
    assert (checkpoint.step, checkpoint.config, checkpoint.facts["updates"]) == (7, CONFIG, 7)
    for start, stop in ((0, COUNT), (99, 101), (330, 340), (COUNT - 1, LAYOUT.size), (5, 5)):
        for name, values in arrays.items():
            out = np.full(stop - start, 3, np.float32)
            checkpoint.read(name, start, out)
            expected = np.append(values, np.zeros(LAYOUT.size - COUNT, np.float32))[start:stop]
            np.testing.assert_array_equal(out, expected)
    for part in range(3):
        checkpoint.check(part, 3)
    parameters = Parameters.zeros(LAYOUT)
    checkpoints.read_parameters(checkpoint.path, parameters)
    np.testing.assert_array_equal(parameters.flat[:COUNT], arrays["parameters"])
    assert checkpoints.read_config(checkpoint.path) == CONFIG


def test_ranges_with_a_gap_are_no_checkpoint(tmp_path, arrays):
    gap = write(tmp_path, {name: values[:-40] for name, values in arrays.items()}, cuts=(0, 333, COUNT - 40))
    with pytest.raises(UserError, match=f"its ranges of parameters do not make {COUNT} elements"):
        Checkpoint(gap)


def test_ranks_that_share_the_check_read_every_byte(tmp_path, arrays):
    """Wherever it is damaged, one of three finds it."""
    path = write(tmp_path, arrays)
    for rank in range(3):
        file = path / checkpoint_files.rank_file(rank)
        sound = file.read_bytes()
        begin = 8 + int.from_bytes(sound[:8], "little")
        for place in range(begin, len(sound), 397):
            file.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
            checkpoint, found = Checkpoint(path), 0
            for part in range(3):
                try:
                    checkpoint.check(part, 3)
                except UserError:
                    found += 1
            assert found == 1
        file.write_bytes(sound)


def test_the_files_are_safetensors(tmp_path, arrays):
    package = pytest.importorskip("safetensors", reason="no safetensors: pip install -e '.[test]'")
    with package.safe_open(write(tmp_path, arrays) / checkpoint_files.rank_file(0), "np") as file:
        np.testing.assert_array_equal(file.get_tensor("m[100:200]"), arrays["m"][100:200])
        assert file.metadata()["run"] == "c" * 32


def test_what_is_not_complete_is_not_there(tmp_path, arrays):
    write(tmp_path, arrays, step=3)
    write(tmp_path, arrays, step=12)
    (tmp_path / "step-00000020.part").mkdir()
    (tmp_path / "step-00000021").mkdir()
    assert [path.name for path in checkpoints.newest_first(tmp_path)] == ["step-00000012", "step-00000003"]
    checkpoints.remove_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000012"]
    write(tmp_path, arrays, step=100)
    checkpoints.remove_old(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000012", "step-00000100"]
    assert write(tmp_path, arrays, step=12).name == "step-00000012", "a step can come again"


def test_milestones_stay_beside_the_newest(tmp_path, arrays):
    for step in (2, 4, 5, 6, 8, 10, 12):
        write(tmp_path, arrays, step=step)
    checkpoints.remove_old(tmp_path, 1, 5)
    assert [int(path.name[5:]) for path in checkpoints.newest_first(tmp_path)] == [12, 10, 5]


def test_what_others_have_put_there_stays(tmp_path, arrays):
    """Files and folders beside checkpoints, or in their place, and whatever a symbolic link leads to."""
    for step in (3, 12, 100):
        write(tmp_path, arrays, step=step)
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    shutil.move(tmp_path / "step-00000003", elsewhere)
    (tmp_path / "step-00000003").symlink_to(elsewhere)
    (elsewhere.with_suffix(".part")).mkdir()
    (tmp_path / "step-00000004.part").symlink_to(elsewhere.with_suffix(".part"))
    for name in ("step-00000012.tar.gz", "step-00000013.part", "step-00000014", "step-notes"):
        (tmp_path / name).touch()
    for name in ("step-x", "step-x.part", "step-5", "step-000000100", "step-00000020", "step-00000012.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").touch()
    shutil.copy(tmp_path / "step-00000012" / "checkpoint.json", tmp_path / "step-000000100")
    before = content(tmp_path) | content(elsewhere)
    checkpoints.remove_parts(tmp_path)
    assert content(tmp_path) | content(elsewhere) == before
    assert [path.name[-3:] for path in checkpoints.newest_first(tmp_path)] == ["100", "012", "003"]
    checkpoints.remove_old(tmp_path, 1)
    gone = before.keys() - (content(tmp_path) | content(elsewhere)).keys()
    assert {path.parent.name for path in gone if path.parent != tmp_path} == {"step-00000012"}
    assert Checkpoint(tmp_path / "step-00000003").step == 3
    write(tmp_path, arrays, step=3)
    assert not (tmp_path / "step-00000003").is_symlink()
    assert Checkpoint(elsewhere).step == 3, "the step comes again: the link gives way, what it leads to stays"


def test_weights_of_a_run_are_a_checkpoints(tmp_path, arrays):
    """A file that is named like one is passed over."""
    checkpoint = write(tmp_path / "checkpoints", arrays)
    (tmp_path / "checkpoints" / "step-00000099").touch()
    assert weights.find(tmp_path) == (checkpoints, checkpoint)


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_parts_of_two_runs_never_make_a_checkpoint(tmp_path, arrays):
    part, facts, files = write_parts(tmp_path, arrays, run="a" * 32)
    checkpoint_files.check_parts(part, facts, files)
    write_parts(tmp_path / "other", {name: -values for name, values in arrays.items()}, run="b" * 32)
    mixed = r"rank-00001\.safetensors: written by the run b+, expected a"
    shutil.copy(tmp_path / "other" / part.name / checkpoint_files.rank_file(1), part)
    with pytest.raises(UserError, match=mixed):
        checkpoint_files.check_parts(part, facts, files)
    with pytest.raises(UserError, match=mixed):
        Checkpoint(checkpoints.complete(part, facts, files))


def test_another_jobs_checkpoint_stays_if_the_run_is_lost_meanwhile(tmp_path, arrays):
    """What this job has written is on disk when it looks at its lock, and nothing else has been touched."""
    others = write(tmp_path, arrays)
    before = content(others)
    part, facts, files = write_parts(tmp_path, arrays)

    def lost():
        assert (part / checkpoints.MARKER).exists()
        raise KeyError

    with pytest.raises(KeyError):
        checkpoints.complete(part, facts, files, lost)
    assert content(others) == before


@pytest.mark.parametrize("what", ["a missing part", "a part cut", "a missing model"])
def test_a_part_that_is_not_there_is_noticed_before_the_marker(tmp_path, arrays, what):
    part, facts, files = write_parts(tmp_path, arrays, run="a" * 32)
    if what == "a missing part":
        (part / checkpoint_files.rank_file(2)).unlink()
    elif what == "a part cut":
        _truncate(part / checkpoint_files.rank_file(2))
    else:
        files["model.bin"] = 7
    with pytest.raises(UserError, match=r"rank-00002|model.bin"):
        checkpoint_files.check_parts(part, facts, files)


def test_a_disk_without_room_leaves_nothing(tmp_path, arrays, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    part = tmp_path / "step-00000001.part"
    monkeypatch.setattr(checkpoint_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint_files.write_part(part, 1, 0, [("m", 0, arrays["m"])], "c" * 32)
    assert not list(part.iterdir())


def changed(path, old, new):
    content = path.read_bytes()
    assert content.count(old) >= 1
    path.write_bytes(content.replace(old, new, 1))


DAMAGE = {
    "a bit of the data": lambda folder: _flip(folder, -3),
    "a bit of the header": lambda folder: _flip(folder, 40),
    "two arrays exchanged": lambda folder: _rename(folder, b"m[0:", b"v[0:"),
    "a range moved": lambda folder: _rename(folder, b"m[100:200]", b"m[200:300]"),
    "a file cut": lambda folder: _truncate(folder / "rank-00000.safetensors"),
    "a file grown": lambda folder: _grow(folder / "rank-00001.safetensors"),
    "a file missing": lambda folder: (folder / "rank-00002.safetensors").unlink(),
    "another checkpoint's file": lambda folder: shutil.copy(
        folder.parent / "step-00000005" / "rank-00001.safetensors", folder / "rank-00001.safetensors"
    ),
    "the marker's step": lambda folder: changed(folder / "checkpoint.json", b'"step": 7', b'"step": 9'),
    "the marker cut": lambda folder: _truncate(folder / "checkpoint.json"),
    "no file at all": lambda folder: (folder / "checkpoint.json").unlink(),
}


def _flip(folder, at):
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def _rename(folder, one, other):
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes().replace(one, b"<one>").replace(other, one).replace(b"<one>", other))


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _grow(path):
    path.write_bytes(path.read_bytes() + b"0")


SAYS = {
    "two arrays exchanged": "does not have its checksum",
    "a range moved": "does not have its checksum",
    "a file grown": r"bytes, expected \d",
    "another checkpoint's file": "does not have its checksum",
    "the marker's step": "not what was written",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_never_read(tmp_path, arrays, what):
    write(tmp_path, {name: -values for name, values in arrays.items()}, step=5)
    folder = write(tmp_path, arrays)
    DAMAGE[what](folder)
    with pytest.raises(UserError, match=rf"step-00000007.*{SAYS.get(what, '')}.*(damaged|disk|read it with)") as error:
        Checkpoint(folder).check(0, 1)
    assert "\n" not in str(error.value)


def test_what_several_hold_is_written_once():
    whole = [(0, 10)]
    assert divide_among_holders([whole, whole, whole], 10) == [[(0, 3)], [(3, 6)], [(6, 10)]]
    assert divide_among_holders([whole, [], []], 10) == [[(0, 10)], [], []]
    parts = divide_among_holders([[(0, 4)], [(4, 12)], [(0, 4), (4, 12)], []], 9)
    assert parts == [[(0, 2)], [(4, 6)], [(2, 4), (6, 9)], []]
    assert sorted(one for rank in parts for one in rank) == [(0, 2), (2, 4), (4, 6), (6, 9)]
