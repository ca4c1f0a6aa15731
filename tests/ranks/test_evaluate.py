"""scripts/evaluate.py at 1, 2 and 3 ranks against losses taken from logits; llm.c's evaluation files and bad ones."""

import codecs
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dist.world import start_world
from gpt2.config import GPT2Config
from gpt2.data.shards import write_shard
from gpt2.errors import UserError
from gpt2.formats import llmc, weights
from gpt2.inference.evaluation import Scorer, strided_windows
from gpt2.inference.evaluation_choices import check_examples, read_examples
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.parameters import Layout, Parameters, no_hook
from scripts import evaluate, export
from scripts.training import evaluation
from scripts.training import start as training_start
from tests.support.in_process import log, train
from tests.support.logits import logits_of
from tests.support.refusal import refusal_of_all

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=16, context=40, vocab_size=256)
SEQUENCE, STRIDE = 24, 7
TEXT = "Der Fluß,\nthe river, 川, река. " * 9
MARKED = TEXT.replace("\n", "<|endoftext|>")

# (label, context, endings): lengths that differ, one ending three times as long as another, one of a single token
EXAMPLES = [
    (2, [5, 9, 200], [[1, 2, 3], [4, 4], [250], [7, 8, 9, 10, 11, 12]]),
    (0, [17], [[30, 31, 32], [33, 34, 35, 36, 37, 38, 39, 40, 41], [42, 43, 44], [45, 46]]),
    (3, list(range(60, 90)), [[1] * 5, [2] * 10, [3] * 2, [4] * 7]),
    (1, [0, 0, 0, 0], [[100, 101], [102, 103, 104], [105, 106, 107, 108], [109]]),
    (2, list(range(150, 140, -1)), [[9, 8, 7], [6, 5], [4, 3, 2, 1, 0], [255, 254]]),
]


def write_evaluation(path, examples=EXAMPLES, header=None, edit=None) -> Path:
    """As llm.c's write_evalfile does it; edit(stream) changes the uint16 before they are written."""
    stream, longest = [], 0
    for index, (label, context, endings) in enumerate(examples):
        one = [65535, 0, index, label, len(endings), len(context), *context]
        for ending in endings:
            one += [len(ending), *ending]
        one[1] = 2 * len(one)
        longest = max(longest, one[1])
        stream += one
    numbers = np.zeros(256, "<i4")
    numbers[:4] = header or (20240522, 1, len(examples), longest)
    stream = np.array(stream, "<u2")
    path.write_bytes(numbers.tobytes() + (stream if edit is None else edit(stream)).tobytes())
    return path


def new_parameters() -> Parameters:
    parameters = Parameters.zeros(Layout(CONFIG))
    parameters.flat[:] = np.random.default_rng(4).normal(0, 0.3, parameters.flat.shape)
    return parameters


def log_probabilities(parameters, text) -> np.ndarray:
    """(T, V): of what follows each token, from gpt2.model's logits, in float64."""
    model = GPT2(load_kernels("numpy", 1), parameters, None, 1, len(text))
    logits = logits_of(model, np.array([text], np.int32))[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def expected_choices(parameters):
    """(acc, acc_norm): each ending read after its context, on its own."""
    correct, normalized = [], []
    for label, context, endings in EXAMPLES:
        sums = []
        for ending in endings:
            found = log_probabilities(parameters, context + ending)
            sums.append(sum(found[len(context) - 1 + place, token] for place, token in enumerate(ending)))
        means = [total / len(ending) for total, ending in zip(sums, endings, strict=True)]
        correct.append(sums.index(max(sums)) == label)
        normalized.append(means.index(max(means)) == label)
    return sum(correct) / len(EXAMPLES), sum(normalized) / len(EXAMPLES)


def expected_text_loss(parameters, text: str) -> float:
    """Token by token: in the first window that holds it, of those that begin at multiples of the stride."""
    tokens, total = [10, *text.encode()], 0.0
    found = {}
    for place in range(1, len(tokens)):
        start = max(0, math.ceil((place - SEQUENCE) / STRIDE)) * STRIDE
        if start not in found:
            found[start] = log_probabilities(parameters, tokens[start : start + SEQUENCE])
        total -= found[start][place - start - 1, tokens[place]]
    return total


def expected_validation_loss(parameters, tokens, length=SEQUENCE) -> float:
    losses = []
    for start in range(0, len(tokens) - length, length):
        window = tokens[start : start + length + 1]
        found = log_probabilities(parameters, window[:-1])
        losses += [-found[place, token] for place, token in enumerate(window[1:])]
    return float(np.mean(losses))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and something to evaluate it on in each of three ways, with what must come out."""
    folder, parameters = tmp_path_factory.mktemp("evaluate"), new_parameters()
    llmc.write_parameters(folder / "model.bin", parameters)
    tokens = np.random.default_rng(6).integers(256, size=24 * 13 + 9).astype(np.uint16)
    write_shard(folder / "tokens_val_0.bin", tokens)
    (folder / "text.txt").write_bytes(codecs.BOM_UTF8 + TEXT.encode())
    (folder / "texts").mkdir()
    (folder / "texts" / "text.txt").symlink_to(folder / "text.txt")
    (folder / "texts" / "empty.txt").write_text("")
    (folder / "documents.txt").write_text(MARKED)
    write_evaluation(folder / "choices.bin")
    run = folder / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    llmc.write_parameters(run / "checkpoints" / "step-00000001" / "model.bin", parameters)
    (run / "config.json").write_text(json.dumps({"settings": {"tokenizer": "bytes"}}))
    (folder / "gpt2").mkdir()
    write_shard(folder / "gpt2" / "a.bin", tokens)
    (folder / "gpt2" / "manifest.json").write_text(json.dumps({"tokenizer": "gpt2"}))
    total, size = expected_text_loss(parameters, TEXT), len(TEXT.encode())
    acc, acc_norm = expected_choices(parameters)
    assert 0 < acc < 1
    assert 0 < acc_norm < 1
    assert acc != acc_norm, "what is summed and what is averaged must differ"
    loss = expected_validation_loss(parameters, tokens)
    expected = {
        "val_data": {"loss": loss, "perplexity": math.exp(loss), "tokens": 24 * 13},
        "text": {
            "loss": total / size, "perplexity": math.exp(total / size), "tokens": size, "bytes": size,
            "bits_per_byte": total / math.log(2) / size,
        },
        "hellaswag": {
            "acc": acc, "acc_norm": acc_norm, "examples": 5, "acc_stderr": math.sqrt(acc * (1 - acc) / 5),
            "acc_norm_stderr": math.sqrt(acc_norm * (1 - acc_norm) / 5),
        },
    }  # fmt: skip
    return folder, expected


@pytest.mark.ranks(1, 3)
def test_all_three_evaluations(comm, files, shared_path, capsys):
    """By scripts/evaluate.py; the number of ranks changes nothing but rounding."""
    folder, expected = files
    data = {"--val-data": "tokens_val_*.bin", "--text": "texts", "--hellaswag": "choices.bin"}
    flags = [part for flag, name in data.items() for part in (flag, folder / name)]
    flags += ["--seq-len", SEQUENCE, "--stride", STRIDE, "--batch-size", 3, "--backend", "numpy"]
    documents = ["--text", folder / "documents.txt", "--split-documents"]
    for name, more in (("found", []), ("rounded", ["--dtype", "bfloat16"]), ("split", documents)):
        words = (folder / "model.bin", *flags, "--json", shared_path / name, *more)
        evaluate.evaluate(evaluate.parse(list(map(str, words))), start_world())
    if comm.rank:
        return
    split = json.loads((shared_path / "split").read_text())["text"]
    assert split["loss"] == pytest.approx(expected["text"]["loss"], rel=1e-5), "in bytes a newline ends a document"
    rounded = json.loads((shared_path / "rounded").read_text())
    for name in ("val_data", "text"):
        assert rounded[name]["loss"] == pytest.approx(expected[name]["loss"], rel=0.01)
        assert rounded[name]["loss"] != pytest.approx(expected[name]["loss"], rel=1e-6)
    found = json.loads((shared_path / "found").read_text())
    assert (found.pop("model"), found.pop("seq_len")) == (str(folder / "model.bin"), SEQUENCE)
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=1e-5), name
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["val-data", "text", "hellaswag"] * 3
    assert f"loss {expected['text']['loss']:.4f}" in lines[1]


@pytest.fixture(scope="module")
def confident(tmp_path_factory):
    """A model of GPT-2's 50257 tokens whose blocks add nothing, sure that a token comes again; 12 windows of tokens,
    of which some do not; and the mean loss, from NumPy in float64."""
    folder, random = tmp_path_factory.mktemp("confident"), np.random.default_rng(3)
    parameters = Parameters.zeros(Layout(GPT2Config(n_layer=1, n_head=2, n_embd=64, context=16, vocab_size=50257)))
    parameters.wte[:50257] = random.normal(0, 0.25, (50257, 64))
    parameters.lnf_weight[:] = 1
    llmc.write_parameters(folder / "model.bin", parameters)
    tokens = np.repeat(random.integers(100, size=25), 8)[: 12 * 16 + 1]
    write_shard(folder / "tokens.bin", tokens.astype(np.uint16))
    wte, inputs, targets = parameters.wte[:50257].astype(np.float64), tokens[:-1], tokens[1:]
    rows = wte[inputs]
    rows = (rows - rows.mean(axis=1, keepdims=True)) / np.sqrt(rows.var(axis=1, keepdims=True) + 1e-5)
    p = np.exp(rows @ wte.T)
    p /= p.sum(axis=1, keepdims=True)
    losses = -np.log(p[np.arange(len(p)), targets])
    assert losses.min() < 0.1 < 10 < losses.max()
    return folder, losses.mean()


@pytest.mark.ranks(1, 4)
def test_losses_over_a_large_vocabulary(comm, confident, shared_path):
    """As evaluate.py and train.py say them, with 1 to 3 threads: float64's, within 1e-5."""
    folder, expected = confident
    val, more = ["--val-data", folder / "tokens.bin"], ["--seq-len", 16, "--backend", "numpy"]
    found = {}
    for threads in (1, 2, 3):
        words = [folder / "model.bin", *val, *more, "--threads", threads, "--json", shared_path / "found"]
        evaluate.evaluate(evaluate.parse(list(map(str, words))), start_world())
        found[f"{threads} threads"] = json.loads((shared_path / "found").read_text())["val_data"]["loss"]
    parts = 2 - comm.size % 2
    flags = ["--train-data", folder / "tokens.bin", *val, "--init", folder / "model.bin", "--tensor-parallel", parts]
    flags += ["--batch-size", 12 * parts // comm.size, "--steps", 1, "--lr", 0, "--eval-every", 1, "--no-shuffle"]
    train(start_world(), shared_path / "run", *flags, *more)
    (step,) = log(shared_path / "run")
    found |= {name: step[name] for name in ("loss", "val_loss")}
    assert found == pytest.approx(dict.fromkeys(found, expected), rel=0, abs=1e-5)


@pytest.mark.parametrize("count", [2, 3, 9, 10, 11, 40])
@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1), (100, 50)])
def test_windows_score_each_token_once(count, length, stride):
    seen = []
    for start, stop, scored in strided_windows(count, length, stride):
        assert 0 <= start < scored < stop <= count
        assert stop - start <= length + 1
        assert start == 0 or scored - start > length - stride
        seen += range(scored, stop)
    assert seen == list(range(1, count))


def test_rows_of_all_lengths_keep_their_order():
    parameters = new_parameters()
    random = np.random.default_rng(1)
    rows = [random.integers(256, size=length) for length in (2, 41, 33, 34, 7, 40, 2)]
    done = []
    losses = Scorer(load_kernels("numpy", 2), parameters, 3, lambda *one: done.append(one)).losses(rows)
    assert done == [(3, 7), (6, 7), (7, 7)]
    for row, found in zip(rows, losses, strict=True):
        expected = -log_probabilities(parameters, row[:-1])[np.arange(len(row) - 1), row[1:]]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_losses_of_a_diverged_model():
    parameters = new_parameters()
    parameters.flat[-1] = np.nan
    with pytest.raises(UserError, match="not finite"):
        Scorer(load_kernels("numpy", 1), parameters, 1).losses([np.array([1, 2])])


def test_an_evaluation_file_is_read(tmp_path):
    examples = read_examples(write_evaluation(tmp_path / "choices.bin"))
    found = [(each.label, each.context.tolist(), [ending.tolist() for ending in each.endings]) for each in examples]
    assert found == EXAMPLES
    assert [each.index for each in examples] == [0, 1, 2, 3, 4]


def changed(place, value):
    def edit(stream):
        stream[place] = value
        return stream

    return edit


SIZE_OF_FIRST = 6 + 3 + 4 + (3 + 2 + 1 + 6)
BAD_FILES = {
    "another kind": ({"header": (20240520, 1, 5, 0)}, "begins with 20240520, expected 20240522 of an llm.c multiple-"),
    "version": ({"header": (20240522, 2, 5, 0)}, "of version 2, expected 1"),
    "no examples": ({"examples": [], "header": (20240522, 1, 0, 0)}, "promises 0 examples"),
    "one too few": ({"header": (20240522, 1, 6, 0)}, "ends after 5 examples of the 6"),
    "one too many": ({"header": (20240522, 1, 4, 0)}, "64 bytes follow the last of its 4 examples"),
    "cut in an example": ({"edit": lambda stream: stream[:-1]}, "ends within example 4"),
    "cut in a head": ({"edit": lambda stream: stream[: SIZE_OF_FIRST + 2]}, "ends within example 1"),
    "cut in a token": ({"edit": lambda stream: np.frombuffer(stream.tobytes()[:-1], np.uint8)}, "end within a token"),
    "start": ({"edit": changed(SIZE_OF_FIRST, 7)}, "example 1 begins with 7, expected 65535"),
    "index": ({"edit": changed(SIZE_OF_FIRST + 2, 3)}, "example 1 says that it is number 3"),
    "label": ({"edit": changed(3, 4)}, "4 endings, label 4"),
    "length": ({"edit": changed(1, 2 * SIZE_OF_FIRST - 2)}, "example 0 of 48 bytes"),
    "odd length": ({"edit": changed(1, 2 * SIZE_OF_FIRST + 1)}, "example 0 of 51 bytes"),
    "length 0": ({"edit": changed(1, 0)}, "example 0 of 0 bytes"),
    "context": ({"edit": changed(5, 60000)}, "does not add up"),
    "empty context": ({"examples": [(0, [], [[1], [2]])]}, "lengths 0, 1, 1"),
    "empty ending": ({"examples": [(0, [1], [[1], []])]}, "lengths 1, 1, 0"),
    "one ending": ({"examples": [(0, [1], [[1]])]}, "1 endings"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_evaluation_file(tmp_path, name):
    options, words = BAD_FILES[name]
    path = write_evaluation(tmp_path / "choices.bin", **options)
    with pytest.raises(UserError) as caught:
        read_examples(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message


def test_examples_that_the_model_cannot_read(tmp_path):
    path = write_evaluation(tmp_path / "choices.bin", [(0, [1] * 30, [[1] * 11, [1]])])
    with pytest.raises(UserError, match="example 0 has 41 tokens, expected at most the model's context, 40"):
        check_examples(path, read_examples(path), CONFIG, 40)
    with pytest.raises(
        UserError, match="has 41 tokens, expected at most 24, as positions 24 to 39 of the model are untr"
    ):
        check_examples(path, read_examples(path), CONFIG, 24)
    path = write_evaluation(tmp_path / "choices.bin", [(0, [1], [[1], [2, 256]])])
    with pytest.raises(UserError, match="example 0 has token 256, expected 0 to 255"):
        check_examples(path, read_examples(path), CONFIG, 40)


@pytest.mark.ranks(2)
def test_a_run_is_evaluated_as_it_was_trained(comm, files, shared_path, capsys):
    """Sequences of 16 of its 40 positions; a run that begins with it has those of both."""

    def evaluated(run, *flags):
        data = ["--val-data", folder / "tokens_val_0.bin", *flags, "--backend", "numpy", "--json", shared_path / "json"]
        evaluate.evaluate(evaluate.parse(list(map(str, (run, *data)))), world)
        comm.Barrier()
        found = json.loads((shared_path / "json").read_text())
        comm.Barrier()
        return found["seq_len"], found["val_data"]["loss"], capsys.readouterr().err

    world, folder = start_world(), files[0]
    flags = ["--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--context", 40, "--eval-every", 0]
    flags += ["--warmup", 1, "--trace", "off", "--strategy", "allreduce", "--backend", "numpy"]
    run, more, less = (shared_path / name for name in ("run", "more", "less"))
    train(world, run, *flags, "--seq-len", 16, "--steps", 2)
    tokens = np.fromfile(folder / "tokens_val_0.bin", "<u2", offset=1024)
    expected = expected_validation_loss(weights.load(run), tokens.tolist(), 16)
    length, loss, said = evaluated(run)
    assert (length, loss) == (16, pytest.approx(expected, rel=1e-5))
    assert said == ("" if comm.rank else "sequences of 16 tokens, as in the run's training (--seq-len; context 40)\n")
    assert ("positions 16 to 19 are untrained" in evaluated(run, "--seq-len", 20)[-1]) == (comm.rank == 0)
    with pytest.raises(SystemExit):  # it has rows of 42 tokens; nothing is evaluated before that is known
        evaluated(run, "--hellaswag", folder / "choices.bin", "--tokenizer", "gpt2")
    printed = capsys.readouterr()
    assert "val-data" not in printed.out
    assert ("expected at most 16, as positions 16 to 39 of the model are untrained" in printed.err) == (comm.rank == 0)
    train(world, more, *flags, "--init", run, "--seq-len", 20, "--steps", 1)
    assert ("model.bin: positions 16 to 19 are untrained" in capsys.readouterr().err) == (comm.rank == 0)
    train(world, less, *flags, "--init", more, "--seq-len", 8, "--steps", 1)
    train(world, less, *flags, "--seq-len", 8, "--steps", 2, "--lr-steps", 2, "--resume")
    assert "untrained" not in capsys.readouterr().err
    assert weights.trained_lengths(less) == (8, 20)
    if comm.rank == 0:
        export.main([str(less), "--format", "llmc", "--out", str(shared_path / "model.bin")])
        assert "less: positions 20 to 39 are untrained: use sequences of at most 20 tokens" in capsys.readouterr().err
    comm.Barrier()
    assert weights.trained_lengths(shared_path / "model.bin") is None
    train(world, shared_path / "imported", *flags, "--init", shared_path / "model.bin", "--seq-len", 8, "--steps", 1)
    assert weights.trained_lengths(shared_path / "imported") == (8, 40)


@pytest.mark.ranks(2)
def test_all_ranks_read_one_checkpoint_of_a_run_that_goes_on(comm, shared_path, monkeypatch):
    """A newer checkpoint appears after a run's newest one was found, by evaluate.py and by train.py --init."""

    def save(step: int) -> None:
        folder = shared_path / "run" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        parameters.flat[:] = step
        llmc.write_parameters(folder / "model.bin", parameters)

    def another(*_):
        comm.Barrier()
        if comm.rank == 0:
            save(next(steps))
        comm.Barrier()

    world, parameters, steps = start_world(), Parameters.zeros(Layout(CONFIG)), iter([1, 2, 3])
    for module in (evaluation, training_start):
        monkeypatch.setattr(module, "check_same_files", another)
    another()
    model = evaluation.load_model(shared_path / "run", None, None, 1, "numpy", "float32", 1, world)
    assert model.parameters.flat[0] == 1
    buffers = SimpleNamespace(fills_parameters=True, filled=no_hook)
    backend = SimpleNamespace(host_parameters=parameters.flat, buffers=buffers)
    training_start.first_parameters(str(shared_path / "run"), 1, 8, backend, parameters.layout, None, world)
    assert parameters.flat[0] == 2


BAD_FLAGS = {
    "a damaged file": (["model.bin", "--hellaswag", "cut.bin"], "cut.bin: ends within example 4"),
    "stride": (["model.bin", "--text", "text.txt", "--stride", "41"], "--stride is 41, expected at most --seq-len, 40"),
    "GPT-2's tokens for a model of bytes": (
        ["run", "--hellaswag", "choices.bin"],
        "choices.bin: tokens made with tokenizer gpt2, expected the model's, bytes",
    ),
    "tokens of another tokenizer": (
        ["run", "--val-data", "gpt2/*.bin"],
        "gpt2/*.bin: tokens made with tokenizer gpt2, expected the model's, bytes",
    ),
}


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BAD_FLAGS)
def test_one_line_for_all_ranks(comm, files, monkeypatch, capsys, name):
    folder, (arguments, words) = files[0], BAD_FLAGS[name]
    monkeypatch.chdir(folder)
    Path("cut.bin").write_bytes(Path("choices.bin").read_bytes()[:-20])
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])

    def run():
        evaluate.evaluate(evaluate.parse(), start_world(mistakes=(UserError,)))

    assert words in refusal_of_all(comm, capsys, run)
