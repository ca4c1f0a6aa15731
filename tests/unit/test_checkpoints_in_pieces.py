"""Checkpoints of models that several ranks share: written in some pieces, read in any others, or as a whole."""

import json
import re

import numpy as np
import pytest

from gpt2 import boxes
from gpt2.errors import UserError
from gpt2.formats import checkpoint_files, checkpoints, huggingface, huggingface_export, llmc, stored_numbers, weights
from gpt2.formats.checkpoints import STATE, Checkpoint
from gpt2.formats.safetensors import StoredTensor
from gpt2.parameters import Layout, Parameters
from scripts import export
from tests.support import cut_models
from tests.support.cut_models import CONFIG, CUTS, WHOLE, arrays, layouts, of_piece, write

SHAPES = [f"{'-'.join(map(str, layers))}x{parts}" for layers, parts in CUTS]
every_cut = pytest.mark.parametrize(("layers", "parts"), CUTS, ids=SHAPES)


@pytest.fixture(scope="module")
def whole():
    return arrays()


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Ranges, and rows that are read at once, are short: all meet within tensors."""
    monkeypatch.setattr(checkpoint_files, "LONGEST", 500)
    monkeypatch.setattr(boxes, "AT_ONCE", 200)
    monkeypatch.setattr(huggingface, "AT_ONCE", 200)


@every_cut
def test_any_piece_is_read_from_any_cut(tmp_path, whole, layers, parts):
    checkpoint, random = Checkpoint(write(tmp_path, whole, layers, parts)), np.random.default_rng(1)
    for layout in (layout for cut in CUTS for layout in layouts(*cut, multiple_of=64)):
        for name, values in whole.items():
            expected = of_piece(values, layout)
            for start, stop in [(0, layout.size), *np.sort(random.integers(layout.size + 1, size=(3, 2)))]:
                out = np.full(stop - start, 3, np.float32)
                checkpoint.read(name, start, out, layout)
                np.testing.assert_array_equal(out, expected[start:stop], err_msg=f"{name} of {layout.shard}")
    out = np.full(WHOLE.count + 3, 3, np.float32)
    checkpoint.read("m", 0, out)
    np.testing.assert_array_equal(out, [*whole["m"], 0, 0, 0])
    for part in range(3):
        checkpoint.check(part, 3)


@every_cut
def test_its_weights_are_a_models(tmp_path, whole, layers, parts):
    """To be sampled from, evaluated, exported, and to begin other runs with, whole or in pieces."""
    run = tmp_path / "run"
    path = write(run / "checkpoints", whole, layers, parts)
    np.testing.assert_array_equal(weights.load(run).flat, whole["parameters"])
    assert weights.read_config(run) == CONFIG
    assert weights.files(path)[0] == path / "checkpoint.json"
    for layout in (layout for cut in CUTS for layout in layouts(*cut, multiple_of=16)):
        assert_reads(run, layout, whole)
    assert export.main([str(run), "--format", "llmc", "--out", str(tmp_path / "model.bin")]) in (0, None)
    np.testing.assert_array_equal(weights.load(tmp_path / "model.bin").flat, whole["parameters"])


def assert_reads(path, layout, whole):
    """A piece's parameters are what is stored, each range when it is said to be filled."""
    parameters, filled, expected = Parameters.zeros(layout), [], of_piece(whole["parameters"], layout)
    parameters.flat.fill(9.0)

    def check(start, stop):
        filled.append((start, stop))
        np.testing.assert_array_equal(parameters.flat[start:stop], expected[start:stop])

    weights.read_parameters(path, parameters, check)
    assert tuple(filled) == layout.held_ranges


@pytest.mark.parametrize("form", ["llm.c", "Hugging Face"])
def test_other_formats_are_read_in_pieces(tmp_path, whole, form):
    path = tmp_path / "model"
    writer = llmc if form == "llm.c" else huggingface_export
    writer.write_parameters(path, Parameters(WHOLE, whole["parameters"]))
    for layout in (layout for cut in CUTS for layout in layouts(*cut)):
        assert_reads(path, layout, whole)


def test_a_piece_reads_its_rows_alone():
    """Of what is cut by rows; the token embedding, the largest tensor, is one of them, and its pad is in no file."""
    rows_read = dict.fromkeys(("wte", "layer.0.fc_weight", "layer.0.fc_bias"), 0)

    def read(tensor, first, rows):
        if tensor.name in rows_read:
            assert first == tensor.box[0][0], tensor.name
            rows_read[tensor.name] += len(rows)

    for layout in layouts((5,), 3):
        stored_numbers.fill(Parameters.zeros(layout), read)
    assert rows_read == {"wte": CONFIG.vocab_size, "layer.0.fc_weight": 4 * 15, "layer.0.fc_bias": 4 * 15}


def test_a_head_of_its_own_is_compared_with_the_rows_that_a_piece_has(tmp_path):
    rows = np.arange(8 * 60, dtype=np.float32).reshape(8, 60)  # three of them at once
    (tmp_path / "head").write_bytes(bytes(5) + rows.tobytes())
    head = StoredTensor(tmp_path / "head", "lm_head.weight", "F32", (8, 60), 5, rows.nbytes)
    huggingface.check_head(head, 2, rows[2:7])
    with pytest.raises(UserError, match="not equal"):
        huggingface.check_head(head, 3, rows[2:7])


def test_rows_are_read_some_at_a_time(whole):
    """A tensor is never there at once, unless it is one row; and what is not wanted is not read."""
    read = []

    def reader(values):
        return lambda start, out: (read.append(len(out)), np.copyto(out, values[start : start + len(out)]))

    stored = [(layout, reader(of_piece(whole["m"], layout))) for layout in layouts((3, 2), 2)]
    target = layouts((5,), 3)[0]
    sizes = {"wte": 200, "layer.4.fcproj_weight": 200, "layer.0.qkv_weight": 15 * 15}  # the last is one row
    for name, most in sizes.items():
        tensor = target.by_name[name]
        out = np.empty(tensor.stop - tensor.start, np.float32)
        boxes.read_range(target, tensor.start, out, stored)
        assert max(read) <= most, name
        assert sum(read) == len(out) if name == "wte" else sum(read) < WHOLE.by_name[name].stop, name
        read.clear()
    boxes.read_range(target, tensor.start + 1, np.empty(3, np.float32), stored)
    assert len(read) == 1, "the part that has these columns, and one row of it"


# --- what is written ---


def test_a_model_that_each_rank_holds_is_written_as_ever(tmp_path, whole):
    marker = json.loads((write(tmp_path, whole, (5,), 1) / "checkpoint.json").read_text())
    assert [*marker] == ["format", "run", "step", "model", "count", "files", "crc32"]
    assert marker["format"] == "gpt2-mpi checkpoint 1"
    assert checkpoints.cut_facts(CONFIG, (5,), 1) == {}


def test_the_marker_says_how_the_model_was_cut(tmp_path, whole):
    path = write(tmp_path, whole, (3, 2), 2)
    marker = json.loads((path / "checkpoint.json").read_text())
    counts = {f"s{stage}t{part}_": layouts((3, 2), 2)[2 * stage + part].count for stage in (0, 1) for part in (0, 1)}
    assert marker["format"] == "gpt2-mpi checkpoint 2"
    assert marker["cut"] == {"layers": [3, 2], "parts": 2, "counts": counts}
    assert marker["count"] == WHOLE.count == sum(counts.values())
    assert {name.partition("[")[0] for name in names(path, 3)} == {f"s0t1_{name}" for name in STATE}
    for layout in layouts((3, 2), 2):
        assert checkpoints.model_facts(layout) == checkpoints.model_facts(WHOLE)


def names(path, rank) -> list[str]:
    """The tensors of a rank's file."""
    content = (path / checkpoint_files.rank_file(rank)).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [name for name in header if name != "__metadata__"]


# --- what is not read ---


def of_file(rank: int, change):
    """Damage that changes the content of a rank's file."""

    def damage(folder):
        path = folder / checkpoint_files.rank_file(rank)
        path.write_bytes(change(path.read_bytes()))

    return damage


def renamed(one: bytes, other: bytes):
    def change(content):
        assert one in content
        assert other in content
        return content.replace(one, b"<one>").replace(other, one).replace(b"<one>", other)

    return change


def of_marker(change):
    """Damage that somebody made on purpose: the checksum is right."""

    def damage(folder):
        path = folder / "checkpoint.json"
        marker = json.loads(path.read_text())
        change(marker)
        marker["crc32"] = checkpoints._marker_checksum(marker)
        path.write_text(json.dumps(marker))

    return damage


def pieces_exchanged(folder):
    """What belongs to one part is said to be the other's, in the files of both."""
    for rank in range(4):
        path = folder / checkpoint_files.rank_file(rank)
        content = path.read_bytes().replace(b"s0t0_v[", b"<one>").replace(b"s0t1_v[", b"s0t0_v[")
        path.write_bytes(content.replace(b"<one>", b"s0t1_v["))


UNCUT = "does not say how its model was cut"
SUM = "does not have its checksum"
DAMAGE = {
    "two arrays exchanged": (of_file(2, renamed(b"s0t1_m[0:", b"s0t1_v[0:")), SUM),
    "pieces exchanged": (pieces_exchanged, "of s0t[01]_v do not make"),
    "another stage": (of_file(0, lambda content: content.replace(b"s0t0_m", b"s1t0_m")), "of s0t0_m do not make"),
    "no stage": (of_file(0, lambda content: content.replace(b'"s0t0_m[', b'"xs0t0_m[')), "damaged"),
    "a file left out": (of_marker(lambda marker: marker["files"].popitem()), "of s1t1_parameters do not make"),
    "no cut": (of_marker(lambda marker: marker.pop("cut")), UNCUT),
    "other layers": (of_marker(lambda marker: marker["cut"].update(layers=[2, 3])), UNCUT),
    "too many layers": (of_marker(lambda marker: marker["cut"].update(layers=[3, 2, 10**9])), UNCUT),
    "layers that are no list": (of_marker(lambda marker: marker["cut"].update(layers=5)), UNCUT),
    "other parts": (of_marker(lambda marker: marker["cut"].update(parts=3)), UNCUT),
    "too many parts": (of_marker(lambda marker: marker["cut"].update(parts=10**9)), UNCUT),
    "another count": (of_marker(lambda marker: marker["cut"]["counts"].update(s0t0_=5)), UNCUT),
    "a later format": (
        of_marker(lambda marker: marker.update(format="gpt2-mpi checkpoint 3")),
        "a gpt2-mpi checkpoint 3, expected a gpt2-mpi checkpoint 1 or 2: read it with the release that wrote it",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_never_read(tmp_path, whole, what):
    folder = write(tmp_path, whole, (3, 2), 2)
    damage, says = DAMAGE[what]
    damage(folder)
    with pytest.raises(UserError, match=rf"step-00000007.*({says})") as error:
        Checkpoint(folder).check(0, 1)
    assert "\n" not in str(error.value)
    assert re.search("damaged|disk|read it with", str(error.value))


def test_damage_is_found_where_other_pieces_are_read(tmp_path, whole):
    folder = write(tmp_path, whole, (3, 2), 2)
    DAMAGE["two arrays exchanged"][0](folder)
    for layout in layouts((5,), 1) + layouts((3, 2), 2)[1:2]:
        with pytest.raises(UserError, match=SUM):
            Checkpoint(folder).read("m", 0, np.empty(layout.size, np.float32), layout)


@every_cut
@pytest.mark.parametrize(("array", "name"), [("m", "layer.3.fc_bias"), ("parameters", "wte"), ("v", "lnf_bias")])
def test_what_is_no_number_is_named_by_its_tensor(tmp_path, whole, layers, parts, array, name):
    broken = {key: values.copy() for key, values in whole.items()}
    broken[array][WHOLE.by_name[name].start] = np.inf
    owner = next(layout for layout in layouts(layers, parts) if name in layout.by_name)
    begin = cut_models.prefix(layers, owner.shard, parts)
    folder = write(tmp_path, broken, layers, parts)
    with pytest.raises(UserError, match=rf"step-00000007: holds inf in {begin}{array} of {name}, expected finite"):
        Checkpoint(folder).check(0, 1)
    if array == "parameters":
        with pytest.raises(UserError, match=f"holds inf in {name}, expected finite"):
            weights.read_parameters(folder, Parameters.zeros(owner))


def test_another_model_is_refused(tmp_path, whole):
    folder = write(tmp_path, whole, (3, 2), 2)
    other = Layout(checkpoints.GPT2Config(**{**vars(CONFIG), "context": 9}))
    with pytest.raises(UserError, match=r"holds GPT2Config.*context=8.*expected GPT2Config.*context=9"):
        checkpoints.read_parameters(folder, Parameters.zeros(other))
