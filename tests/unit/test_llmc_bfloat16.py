"""llm.c model checkpoints of version 5: bfloat16, against one packed and rounded by hand."""

import io

import ml_dtypes
import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.formats import llmc
from gpt2.formats.stored_numbers import write_numbers
from gpt2.parameters import Layout, Parameters, initialize
from tests.gpu.cuda_shim.memory import to_bfloat16

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=4, context=3, vocab_size=5)


def packed(padded_vocab_size: int) -> tuple[bytes, np.ndarray]:
    """A checkpoint, and its numbers as float32 in the file's order."""
    count = llmc.parameter_count(CONFIG, padded_vocab_size)
    numbers = np.random.default_rng(4).standard_normal(count).astype(ml_dtypes.bfloat16)
    header = np.zeros(256, "<i4")
    header[:8] = 20240326, 5, CONFIG.context, CONFIG.vocab_size, 2, 2, 4, padded_vocab_size
    return header.tobytes() + numbers.tobytes(), numbers.astype(np.float32)


@pytest.mark.parametrize("padded_vocab_size", [5, 8, 128])
def test_reads_a_checkpoint_packed_by_hand(tmp_path, padded_vocab_size):
    """The order of tensors is that of version 3, which test_llmc.py goes through."""
    content, numbers = packed(padded_vocab_size)
    (tmp_path / "model.bin").write_bytes(content)
    header = np.frombuffer(content[:1024], "<i4").copy()
    header[1] = 3
    (tmp_path / "float32.bin").write_bytes(header.tobytes() + numbers.tobytes())
    ours, expected = (Parameters.zeros(Layout(CONFIG)) for _ in range(2))
    assert llmc.read_config(tmp_path / "model.bin") == CONFIG
    llmc.read_parameters(tmp_path / "model.bin", ours)
    llmc.read_parameters(tmp_path / "float32.bin", expected)
    assert (ours.flat == expected.flat).all()
    assert ours.flat.any()


def test_writes_the_bytes_it_read(tmp_path):
    content = bytearray(packed(128)[0])
    content[1024 + 2 * 5 * 4 : 1024 + 2 * 128 * 4] = bytes(2 * 123 * 4)  # wte's pad is written as 0
    (tmp_path / "a.bin").write_bytes(content)
    parameters = Parameters.zeros(Layout(CONFIG))
    llmc.read_parameters(tmp_path / "a.bin", parameters)
    llmc.write_parameters(tmp_path / "b.bin", parameters, stored="bfloat16")
    assert (tmp_path / "b.bin").read_bytes() == content


def test_rounds_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2.formats.stored_numbers.AT_ONCE", 1000)
    config = GPT2Config(n_layer=3, n_head=2, n_embd=16, context=8, vocab_size=200)
    parameters, again = (Parameters.zeros(Layout(config, 64)) for _ in range(2))
    initialize(parameters, seed=1)
    llmc.write_parameters(tmp_path / "model.bin", parameters, stored="bfloat16")
    llmc.read_parameters(tmp_path / "model.bin", again)
    assert (again.flat == parameters.flat.astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    assert (tmp_path / "model.bin").stat().st_size == 1024 + 2 * Layout(config).count


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


@pytest.mark.parametrize(("change", "fact"), [(slice(0, -2), "2 too few"), (slice(0, -1), "1 too few")])
def test_refuses_a_truncated_checkpoint(tmp_path, change, fact):
    path = tmp_path / "model.bin"
    path.write_bytes(packed(8)[0][change])
    with pytest.raises(UserError, match=rf"{fact}.*bfloat16 parameters"):
        llmc.read_config(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path, config = tmp_path / "model.bin", GPT2Config(n_layer=2, n_head=2, n_embd=64, context=8, vocab_size=200)
    parameters = Parameters.zeros(Layout(config))
    llmc.write_parameters(path, parameters)
    content = path.read_bytes()
    with pytest.raises(UserError, match=r"model.bin: ends \d+ bytes too early: cannot read"):
        llmc.read_parameters(path, parameters, lambda *_: path.write_bytes(content[:-20]))
