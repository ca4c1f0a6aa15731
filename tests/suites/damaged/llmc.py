"""Files of llm.c and checkpoints, to be damaged: exactly the numbers that a reference reader of ten lines finds in
llm.c's, refused where it finds none. A weight has no checksum there: another value is another value.

Checkpoints have: what is read is what was written.
"""

import struct
from functools import partial
from pathlib import Path

import numpy as np

from gpt2.config import GPT2Config
from gpt2.data.shards import open_shard, write_shard
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from gpt2.formats import checkpoint_files, checkpoints
from gpt2.formats.checkpoints import Checkpoint
from gpt2.formats.llmc import read_config, read_parameters, write_parameters
from gpt2.inference.evaluation_choices import read_examples
from gpt2.parameters import Layout, Parameters, initialize
from tests.ranks.test_evaluate import write_evaluation
from tests.support import cut_models
from tests.support.mutations import Damaged, Mutator

SMALL = GPT2Config(n_layer=2, n_head=2, n_embd=4, context=3, vocab_size=5)
T = 3


def of_bytes(mutator: Mutator, content: bytes, head: int) -> bytes:
    return mutator.of_bytes(content, head)


# --- token shards ---


def tokens_in(content: bytes) -> list[int] | None:
    """The tokens of a shard by llm.c's own rules; None for what is no shard."""
    if len(content) < 1024:
        return None
    magic, version, count = struct.unpack_from("<3i", content)
    if (magic, version) != (20240520, 1) or count < 1 or len(content) != 1024 + 2 * count:
        return None
    return list(struct.unpack_from(f"<{count}H", content, 1024))


def shard(folder: Path) -> Damaged:
    path = folder / "a.bin"
    write_shard(path, np.random.default_rng(0).integers(0, 65536, 32))

    def read():
        opened = open_shard(path)
        windows = Windows([opened], T) if len(opened) > T else None
        inputs, targets = np.zeros((2, windows.count if windows else 0, T), np.int32)
        if windows:
            windows.read(0, inputs, targets)
        return opened[:].tolist(), np.hstack([inputs, targets[:, -1:]]).tolist()

    def judge(mutant, value):
        expected = tokens_in(mutant)
        assert (value and value[0]) == expected
        if value:
            assert value[1] == [expected[at : at + T + 1] for at in range(0, len(expected) - T, T)]

    return Damaged(path, partial(of_bytes, head=16), read, UserError, judge, least=10)


# --- llm.c's model files ---


def model_in(content: bytes) -> tuple | None:
    """(the header's six numbers, wte, all other weights) of a model file; None for what is none."""
    if len(content) < 1024:
        return None
    magic, version, context, vocabulary, layers, heads, channels, padded = struct.unpack_from("<8i", content)
    sizes = (context, vocabulary, layers, heads, channels, padded)
    if magic != 20240326 or version not in (3, 5) or min(sizes) < 1 or channels % heads or padded < vocabulary:
        return None
    rest = context * channels + layers * (12 * channels**2 + 13 * channels) + 2 * channels
    if len(content) != 1024 + (4 if version == 3 else 2) * (padded * channels + rest):
        return None
    weights = np.frombuffer(content, "<f4" if version == 3 else "<u2", offset=1024)
    if version == 5:  # bfloat16 is the upper half of a float32
        weights = (weights.astype("<u4") << 16).view("<f4")
    return sizes, weights[: vocabulary * channels], weights[padded * channels :]


def model(folder: Path, stored: str) -> Damaged:
    path, target = folder / "model.bin", Parameters.zeros(Layout(SMALL))
    initialize(target, seed=1)
    write_parameters(path, target, stored=stored)

    def read():
        config = read_config(path)
        if config == SMALL:
            target.flat[:] = 77.0
            read_parameters(path, target)
        return config, target.flat.copy()

    def judge(mutant, value):
        expected = model_in(mutant)
        assert (value is None) == (expected is None)
        if value is None:
            return
        config, flat = value
        sizes, wte, rest = expected
        assert (config.context, config.vocab_size, config.n_layer, config.n_head, config.n_embd) == sizes[:5]
        if config == SMALL:
            assert flat[: wte.size].tobytes() == wte.tobytes()
            assert not flat[wte.size : SMALL.padded_vocab_size * SMALL.n_embd].any()
            assert sorted(flat[SMALL.padded_vocab_size * SMALL.n_embd :].view("<u4")) == sorted(rest.view("<u4"))

    def content(value):
        return value[0], value[1].tobytes()

    return Damaged(path, partial(of_bytes, head=36), read, UserError, judge, content=content, least=10)


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


def evaluation(folder: Path) -> Damaged:
    path = folder / "choices.bin"
    write_evaluation(path)

    def read():
        examples = read_examples(path)
        return [(e.index, e.label, e.context.tolist(), [one.tolist() for one in e.endings]) for e in examples]

    def judge(mutant, value):
        assert value == choices_in(mutant)

    return Damaged(path, partial(of_bytes, head=12), read, UserError, judge, least=10)


# --- checkpoints ---


def checkpoint(folder: Path, name: str, mutate) -> Damaged:
    """Of two ranks, in ranges shorter than usual, so that there are several in a file."""
    layout = Layout(SMALL)
    arrays = {name: np.random.default_rng(7).random(layout.count, np.float32) for name in checkpoints.STATE}
    part, files = folder / "step-00000007.part", {}
    for rank, cut in enumerate((slice(0, 100), slice(100, layout.count))):
        ranges = [(array, cut.start, values[cut]) for array, values in arrays.items()]
        files[checkpoint_files.rank_file(rank)] = checkpoint_files.write_part(part, 7, rank, ranges, "run")
    facts = {"run": "run", "step": 7, "next_window": 28} | checkpoints.model_facts(layout)
    whole = checkpoints.complete(part, facts, files)
    return of_checkpoint(whole, name, mutate, SMALL, arrays)


def checkpoint_in_pieces(folder: Path, name: str, mutate) -> Damaged:
    """Of two parts of two stages, read as a whole model."""
    arrays = cut_models.arrays()
    whole = cut_models.write(folder, arrays, (3, 2), 2, copies=1)
    return of_checkpoint(whole, name, mutate, cut_models.CONFIG, arrays)


def of_checkpoint(whole: Path, name: str, mutate, config, arrays: dict) -> Damaged:
    facts, size = Checkpoint(whole).facts, (whole / name).stat().st_size

    def read():
        found = Checkpoint(whole)
        found.check(0, 1)
        read = {array: np.empty_like(values) for array, values in arrays.items()}
        for array, out in read.items():
            found.read(array, 0, out)
        return found, read

    def judge(mutant, value):
        if value is not None:
            found, read = value
            assert (found.facts, found.config) == (facts, config)
            assert all(np.array_equal(read[array], values) for array, values in arrays.items())
            assert len(mutant) == size or name == checkpoints.MARKER

    def content(value):
        return value[0].facts, [values.tobytes() for values in value[1].values()]

    return Damaged(whole / name, mutate, read, UserError, judge, whole, content)
