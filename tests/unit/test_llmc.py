"""llm.c model checkpoints, against a file packed by hand in llm.c's order."""

import io
import struct
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.formats import llmc_header
from gpt2.formats.llmc import parameter_count, read_config, read_parameters, write_parameters
from gpt2.formats.stored_numbers import write_numbers
from gpt2.parameters import Layout, Parameters, initialize
from tests.gpu.cuda_shim.memory import to_bfloat16
from tests.support.refusal import refusal
from tests.unit.test_data import with_header

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=4, context=3, vocab_size=5)
DTYPES = {"float32": np.dtype("<f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
L, C, T, V = CONFIG.n_layer, CONFIG.n_embd, CONFIG.context, CONFIG.vocab_size

# llm.c's 16 tensors in the file's order, after the embeddings: our name and the shape of one layer's.
KINDS = [
    ("ln1_weight", (C,)), ("ln1_bias", (C,)), ("qkv_weight", (3 * C, C)), ("qkv_bias", (3 * C,)),
    ("attproj_weight", (C, C)), ("attproj_bias", (C,)), ("ln2_weight", (C,)), ("ln2_bias", (C,)),
    ("fc_weight", (4 * C, C)), ("fc_bias", (4 * C,)), ("fcproj_weight", (C, 4 * C)), ("fcproj_bias", (C,)),
]  # fmt: skip


def packed(padded_vocab_size: int, stored="float32") -> bytes:
    """A checkpoint whose n-th number after wte is n; wte's are negative, its pad -999."""
    wte = [-float(number) for number in range(V * C)] + [-999.0] * ((padded_vocab_size - V) * C)
    rest = T * C + L * sum(int(np.prod(shape)) for _, shape in KINDS) + 2 * C
    header = [20240326, {"float32": 3, "bfloat16": 5}[stored], T, V, L, CONFIG.n_head, C, padded_vocab_size]
    return struct.pack("<256i", *header, *[0] * 248) + np.array([*wte, *range(rest)], DTYPES[stored]).tobytes()


def new_parameters(config=CONFIG, multiple_of=1) -> Parameters:
    return Parameters.zeros(Layout(config, multiple_of))


@pytest.mark.parametrize("padded_vocab_size", [V, 8, 128, 256])
def test_reads_a_checkpoint_packed_by_hand(tmp_path, padded_vocab_size):
    path = tmp_path / "model.bin"
    path.write_bytes(packed(padded_vocab_size))
    assert read_config(path) == CONFIG
    parameters = new_parameters(multiple_of=7)
    parameters.flat[:] = 77.0
    read_parameters(path, parameters)
    assert (parameters.wte[:V].ravel() == -np.arange(V * C)).all()
    assert (parameters.wte[V:] == 0).all()
    position = T * C
    assert (parameters.wpe.ravel() == np.arange(position)).all()
    for name, shape in KINDS:
        for layer in range(L):
            tensor = parameters.view(f"layer.{layer}.{name}")
            assert tensor.shape == shape
            assert (tensor.ravel() == np.arange(position, position + tensor.size)).all()
            position += tensor.size
    assert (parameters.lnf_weight == np.arange(position, position + C)).all()
    assert (parameters.lnf_bias == np.arange(position + C, position + 2 * C)).all()


@pytest.mark.parametrize("padded_vocab_size", [V, 8, 128])
def test_reads_bfloat16_in_the_same_order(tmp_path, padded_vocab_size):
    parameters = {"float32": new_parameters(), "bfloat16": new_parameters()}
    for stored, found in parameters.items():
        (tmp_path / stored).write_bytes(packed(padded_vocab_size, stored))
        assert read_config(tmp_path / stored) == CONFIG
        read_parameters(tmp_path / stored, found)
    assert (parameters["bfloat16"].flat == parameters["float32"].flat.astype(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_writes_the_bytes_it_read(tmp_path, stored):
    content = bytearray(packed(CONFIG.padded_vocab_size, stored))
    item = DTYPES[stored].itemsize
    content[1024 + item * V * C : 1024 + item * 128 * C] = bytes(item * 123 * C)  # wte's pad is written as 0
    (tmp_path / "a.bin").write_bytes(content)
    parameters = new_parameters()
    read_parameters(tmp_path / "a.bin", parameters)
    write_parameters(tmp_path / "b.bin", parameters, stored=stored)
    assert (tmp_path / "b.bin").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "b.bin"]


@pytest.mark.parametrize(("stored", "multiple_of"), [("float32", 1), ("float32", 64), ("bfloat16", 64)])
def test_round_trip(tmp_path, monkeypatch, stored, multiple_of):
    monkeypatch.setattr("gpt2.formats.stored_numbers.AT_ONCE", 1000)
    config = GPT2Config(n_layer=3, n_head=2, n_embd=16, context=8, vocab_size=200)
    parameters, again = new_parameters(config, multiple_of), new_parameters(config, multiple_of)
    initialize(parameters, seed=1)
    write_parameters(tmp_path / "model.bin", parameters, stored=stored)
    assert read_config(tmp_path / "model.bin") == config
    read_parameters(tmp_path / "model.bin", again)
    assert (again.flat == parameters.flat.astype(DTYPES[stored])).all()


def test_rounding_is_to_nearest_and_ties_to_even():
    """Around every bfloat16: itself, halfway to the next, and one bit to each side of that."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    bits = np.concatenate([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).astype(np.uint32)
    values = bits.view(np.float32)
    number = ~np.isnan(values)
    file = io.BytesIO()
    write_numbers(file, values, "bfloat16")
    rounded = np.frombuffer(file.getvalue(), np.uint16)
    assert (rounded[number] == to_bfloat16(values)[number]).all()
    assert np.isnan(rounded[~number].view(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_the_size_of_gpt2():
    config = GPT2Config(n_layer=12, n_head=12, n_embd=768, context=1024, vocab_size=50257)
    assert parameter_count(config, 50257) == 124_439_808
    assert parameter_count(config, 50304) == 124_475_904 == Layout(config).count


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"", ["is empty", "model checkpoint"]),
        (with_header(packed(8), i0=20240520), ["token shard", "--train-data"]),
        (with_header(packed(8), i0=20240327), ["debug state"]),
        (with_header(packed(8), i1=5), ["too many", "bfloat16 parameters"]),
        (with_header(packed(8), i1=1), ["version 1", "padded vocabulary", "not read", "float32", "bfloat16"]),
        (with_header(packed(8), i1=9), ["version 9", "expected 3 (float32) or 5 (bfloat16)"]),
        (with_header(packed(8), i4=0), ["n_layer 0"]),
        (with_header(packed(8), i6=-4), ["n_embd -4"]),
        (with_header(packed(8), i5=3), ["n_head 3", "n_embd 4"]),
        (with_header(packed(8), i7=4), ["vocab_size 5", "padded_vocab_size 4"]),
        (with_header(packed(8), i4=2**31 - 1), ["too few", "copy it again"]),
        (packed(8)[:-4], ["4 too few", "float32 parameters"]),
        (packed(8) + b"12345678", ["8 too many"]),
        (packed(8, "bfloat16")[:-1], ["1 too few", "bfloat16 parameters"]),
    ],
)
def test_refuses_a_damaged_checkpoint(tmp_path, content, facts):
    path, parameters = tmp_path / "model.bin", new_parameters()
    path.write_bytes(content)
    message = refusal(read_config, path)
    for fact in [str(path), *facts]:
        assert fact in message
    assert refusal(read_parameters, path, parameters) == message
    assert (parameters.flat == 0).all()


def test_a_header_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(2000))
    monkeypatch.setattr(llmc_header.np, "fromfile", lambda *given, **how: np.zeros(0, "<i4"))
    assert "with a header of 1024 bytes: write or copy it again" in refusal(read_config, path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path, config = tmp_path / "model.bin", GPT2Config(n_layer=2, n_head=2, n_embd=64, context=8, vocab_size=200)
    parameters = Parameters.zeros(Layout(config))
    write_parameters(path, parameters)
    content = path.read_bytes()
    with pytest.raises(UserError, match=r"model.bin: ends \d+ bytes too early: cannot read"):
        read_parameters(path, parameters, lambda *_: path.write_bytes(content[:-20]))


def test_refuses_a_missing_file_and_an_unwritable_place(tmp_path):
    assert "No such file" in refusal(read_config, tmp_path / "model.bin")
    assert "Is a directory" in refusal(read_config, tmp_path)
    assert "No such file" in refusal(write_parameters, tmp_path / "absent" / "model.bin", new_parameters())


@pytest.mark.parametrize("change", [{"n_head": 1}, {"vocab_size": 6}, {"context": 4}, {"n_layer": 1}])
def test_refuses_another_shape_and_shows_both(tmp_path, change):
    path, other = tmp_path / "model.bin", replace(CONFIG, **change)
    path.write_bytes(packed(8))
    message = refusal(read_parameters, path, new_parameters(other))
    assert f"holds {CONFIG}" in message
    assert f"expected {other}" in message
