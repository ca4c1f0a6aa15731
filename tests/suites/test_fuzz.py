"""Damaged files: a thousand mutants of each kind are refused with one clear line, or read as what their bytes say.

Shards, model files and evaluations: exactly the numbers that a reference reader of ten lines finds, and refused where
it finds none. A weight has no checksum there: another value is another value. Checkpoints have: what is read is what
was written. test_fuzz_huggingface.py and test_fuzz_runs.py do the same with folders, test_fuzz_objects.py looks for
what would unpickle a file.
"""

import struct

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.data.shards import open_shard, write_shard
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from gpt2.formats import checkpoints
from gpt2.formats.checkpoints import Checkpoint
from gpt2.formats.llmc import read_config, read_parameters, write_parameters
from gpt2.inference.evaluation_choices import read_examples
from gpt2.parameters import Layout, Parameters, initialize
from tests.ranks.test_evaluate import write_evaluation
from tests.support.mutations import read_mutants

pytestmark = pytest.mark.any_mpi

# --- token shards ---


def tokens_in(content: bytes) -> list[int] | None:
    """The tokens of a shard by llm.c's own rules; None for what is no shard."""
    if len(content) < 1024:
        return None
    magic, version, count = struct.unpack_from("<3i", content)
    if (magic, version) != (20240520, 1) or count < 1 or len(content) != 1024 + 2 * count:
        return None
    return list(struct.unpack_from(f"<{count}H", content, 1024))


def test_a_shard(tmp_path):
    path, T, read_at_all = tmp_path / "a.bin", 3, 0
    write_shard(path, np.random.default_rng(0).integers(0, 65536, 32))

    def read():
        shard = open_shard(path)
        windows = Windows([shard], T) if len(shard) > T else None
        inputs, targets = np.zeros((2, windows.count if windows else 0, T), np.int32)
        if windows:
            windows.read(0, inputs, targets)
        return shard[:].tolist(), np.hstack([inputs, targets[:, -1:]]).tolist()

    for mutant, result in read_mutants(path, lambda mutator, content: mutator.of_bytes(content, 16), read, UserError):
        expected = tokens_in(mutant)
        assert (result and result[0]) == expected
        if result:
            assert result[1] == [expected[at : at + T + 1] for at in range(0, len(expected) - T, T)]
            read_at_all += 1
    assert read_at_all > 100


# --- llm.c's model files ---

SMALL = GPT2Config(n_layer=2, n_head=2, n_embd=4, context=3, vocab_size=5)


def model_in(content: bytes) -> tuple | None:
    """(the header's six numbers, wte, all other weights) of a model file; None for what is none."""
    if len(content) < 1024:
        return None
    magic, version, context, vocabulary, layers, heads, channels, padded = struct.unpack_from("<8i", content)
    sizes = (context, vocabulary, layers, heads, channels, padded)
    if (magic, version) != (20240326, 3) or min(sizes) < 1 or channels % heads or padded < vocabulary:
        return None
    rest = context * channels + layers * (12 * channels**2 + 13 * channels) + 2 * channels
    if len(content) != 1024 + 4 * (padded * channels + rest):
        return None
    weights = np.frombuffer(content, "<f4", offset=1024)
    return sizes, weights[: vocabulary * channels], weights[padded * channels :]


def test_a_model_file(tmp_path):
    path, read_at_all = tmp_path / "model.bin", 0
    parameters = Parameters.zeros(Layout(SMALL))
    initialize(parameters, seed=1)
    write_parameters(path, parameters)
    target = Parameters.zeros(Layout(SMALL))

    def read():
        config = read_config(path)
        if config == SMALL:
            target.flat[:] = 77.0
            read_parameters(path, target)
        return config, target.flat.copy()

    for mutant, result in read_mutants(path, lambda mutator, content: mutator.of_bytes(content, 36), read, UserError):
        expected = model_in(mutant)
        assert (result is None) == (expected is None)
        if result is None:
            continue
        config, flat = result
        sizes, wte, rest = expected
        assert (config.context, config.vocab_size, config.n_layer, config.n_head, config.n_embd) == sizes[:5]
        if config == SMALL:
            assert flat[: wte.size].tobytes() == wte.tobytes()
            assert not flat[wte.size : SMALL.padded_vocab_size * SMALL.n_embd].any()
            assert sorted(flat[SMALL.padded_vocab_size * SMALL.n_embd :].view("<u4")) == sorted(rest.view("<u4"))
            read_at_all += 1
    assert read_at_all > 100


# --- llm.c's multiple-choice evaluations ---


def choices_in(content: bytes) -> list | None:
    """(index, label, context, endings) of each example of an evaluation file; None for what is none."""
    magic, version, count = struct.unpack_from("<3i", content) if len(content) >= 1024 else (0, 0, 0)
    if (magic, version) != (20240522, 1) or count < 1 or len(content) % 2:
        return None
    rest, examples = [*struct.unpack_from(f"<{(len(content) - 1024) // 2}H", content, 1024)], []
    while rest:
        start, length, index, label, endings = (*rest, 0, 0, 0, 0, 0)[:5]
        one, parts = rest[5 : length // 2], []
        while one:
            parts.append(one[1 : 1 + one[0]])
            one = one[1 + one[0] :] if len(parts[-1]) == one[0] > 0 else [0]
            if one == [0]:
                return None
        if start != 65535 or length % 2 or index != len(examples) or not label < endings == len(parts) - 1 > 1:
            return None
        examples.append((index, label, parts[0], parts[1:]))
        rest = rest[length // 2 :] if 10 <= length <= 2 * len(rest) else None
    return examples if rest == [] and len(examples) == count else None


def test_an_evaluation_file(tmp_path):
    path, read_at_all = tmp_path / "choices.bin", 0
    write_evaluation(path)

    def read():
        examples = read_examples(path)
        return [(e.index, e.label, e.context.tolist(), [one.tolist() for one in e.endings]) for e in examples]

    for mutant, result in read_mutants(path, lambda mutator, content: mutator.of_bytes(content, 12), read, UserError):
        assert result == choices_in(mutant)
        read_at_all += result is not None
    assert read_at_all > 100


# --- checkpoints ---


@pytest.fixture
def checkpoint(tmp_path):
    """(folder, {name: values}): of two ranks, in ranges shorter than usual, so that there are several in a file."""
    layout = Layout(SMALL)
    arrays = {name: np.random.default_rng(7).random(layout.count, np.float32) for name in checkpoints.STATE}
    part, files = tmp_path / "step-00000007.part", {}
    for rank, cut in enumerate((slice(0, 100), slice(100, layout.count))):
        ranges = [(name, cut.start, values[cut]) for name, values in arrays.items()]
        files[checkpoints.rank_file(rank)] = checkpoints.write_part(part, 7, rank, ranges)
    facts = {"step": 7, "next_window": 28} | checkpoints.model_facts(layout)
    return checkpoints.complete(part, facts, files), arrays


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        (checkpoints.rank_file(1), lambda mutator, content: mutator.of_bytes(content, 800)),
        (checkpoints.rank_file(1), lambda mutator, content: mutator.of_sized_header(content)),
        (checkpoints.MARKER, lambda mutator, content: mutator.of_json(content)),
    ],
    ids=["rank's bytes", "rank's header", "marker"],
)
def test_a_checkpoint(checkpoint, name, mutate):
    """Its checksums leave nothing to chance: what is read is what was written."""
    folder, arrays = checkpoint
    facts = Checkpoint(folder).facts

    def read():
        found = Checkpoint(folder)
        found.check(0, 1)
        read = {array: np.empty_like(values) for array, values in arrays.items()}
        for array, out in read.items():
            found.read(array, 0, out)
        return found, read

    for mutant, result in read_mutants(folder / name, mutate, read, UserError, folder):
        if result is not None:
            found, read = result
            assert (found.facts, found.config) == (facts, SMALL)
            assert all(np.array_equal(read[array], values) for array, values in arrays.items())
            assert len(mutant) == (folder / name).stat().st_size or name == checkpoints.MARKER
