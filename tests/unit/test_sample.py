"""scripts/sample.py: one text from whatever holds the weights, text in pieces, tokenizers, every user's mistake."""
# ruff: noqa: E402

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken

SCRIPTS = Path(__file__).parents[2] / "scripts"

from gpt2.config import GPT2Config
from gpt2.data.tokenizers import byte_encoding
from gpt2.errors import UserError
from gpt2.formats import checkpoint_files, checkpoints, huggingface_export, llmc
from gpt2.inference.cached_model import CachedGPT2
from gpt2.inference.generated_text import Sampling, document_start, printable, prompt_tokens, sample_text, text_pieces
from gpt2.kernels import load_kernels
from gpt2.parameters import Layout, Parameters
from scripts import sample
from scripts.settings.tokenizer import choose_tokenizer

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=16, context=32, vocab_size=256)
PIECES = ["H", "a", "l", "o", " ", "\u20ac".encode()[:1], "\u20ac".encode()[1:], b"\xff", "lo"]
WORDS = tiktoken.Encoding(
    name="words",
    pat_str=r"(?s:.)",
    mergeable_ranks={part if isinstance(part, bytes) else part.encode(): rank for rank, part in enumerate(PIECES)},
    special_tokens={"<|endoftext|>": 9},
)


def new_parameters(seed=4, config=CONFIG) -> Parameters:
    parameters = Parameters.zeros(Layout(config))
    parameters.flat[:] = np.random.default_rng(seed).normal(0, 0.3, parameters.flat.shape)
    parameters.wte[config.vocab_size :] = 0.0
    return parameters


def new_run(folder, steps=(100, 200), **facts) -> Path:
    """A run that was interrupted: checkpoints of flat ranges, written by two ranks, in uneven parts."""
    for step in steps:
        parameters = new_parameters(step)
        part = folder / "checkpoints" / f"{checkpoints.folder_name(step)}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        cuts, files = (0, 1234, len(parameters.flat)), {}
        for rank in range(2):
            low, high = cuts[rank : rank + 2]
            ranges = [(array, low, parameters.flat[low:high]) for array in checkpoints.STATE]
            files[checkpoint_files.rank_file(rank)] = checkpoint_files.write_part(part, step, rank, ranges, "run")
        shape = {"trained_positions": facts.get("seq_len")} | facts | checkpoints.model_facts(parameters.layout)
        checkpoints.complete(part, {"run": "run", "step": step} | shape, files)
    (folder / "config.json").write_text(json.dumps({"settings": {"tokenizer": "bytes"}}))
    return folder


def text_of(capsys, *arguments) -> str:
    assert sample.main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def test_the_same_text_from_whatever_holds_the_weights(tmp_path, capsys):
    run = new_run(tmp_path / "run")
    llmc.write_parameters(tmp_path / "model.bin", new_parameters(200))
    huggingface_export.write_parameters(tmp_path / "folder", new_parameters(200))
    flags = ["--prompt", "Once ", "--tokens", 50, "--threads", 1, "--seed", 3]
    text = text_of(capsys, run, *flags)
    assert text.startswith("Once ")
    for path in ("run/checkpoints/step-00000200", "model.bin", "folder", "folder/model.safetensors"):
        assert text_of(capsys, tmp_path / path, *flags) == text, path
    assert text_of(capsys, run / "checkpoints/step-00000100", *flags) != text
    assert text_of(capsys, run, *flags[:-1], 4) != text
    shutil.copy(tmp_path / "model.bin", run / "checkpoints" / "step-00000200")
    assert text_of(capsys, run, *flags) == text
    likeliest = text_of(capsys, run, *flags, "--temperature", 0)
    assert text_of(capsys, run, *flags[:-1], 4, "--temperature", 0) == likeliest
    assert text_of(capsys, run, *flags, "--top-k", 1) == likeliest
    assert text_of(capsys, run, *flags, "--top-p", 1e-9) == likeliest


def test_a_run_reads_no_more_than_its_training_did(tmp_path, capsys):
    """Sequences of 16 tokens: those of --seq-len 16 with any weights. More is allowed, and said to be untrained."""
    run = new_run(tmp_path / "run", seq_len=16)
    llmc.write_parameters(tmp_path / "model.bin", new_parameters(200))
    flags = ["--prompt", "Once ", "--tokens", "50", "--threads", "1"]
    expected = text_of(capsys, tmp_path / "model.bin", *flags, "--seq-len", 16)
    assert expected != text_of(capsys, tmp_path / "model.bin", *flags)
    assert sample.main([str(run), *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected
    assert "\nsequences of 16 tokens, as in the run's training (--seq-len; context 32)\n" in captured.err
    assert sample.main([str(run), *flags, "--seq-len", "20"]) == 0
    assert "\nwarning: " in (said := capsys.readouterr().err)
    assert "positions 16 to 19 are untrained" in said
    new_run(run, [300], seq_len=16, trained_positions=32)  # it began with a model that had read longer sequences
    assert sample.main([str(run), *flags, "--seq-len", "20"]) == 0
    assert "untrained" not in capsys.readouterr().err


def test_a_model_samples_in_bfloat16(tmp_path, capsys):
    """Its likeliest tokens are float32's for a while, and what makes the products is said."""
    llmc.write_parameters(tmp_path / "model.bin", new_parameters())
    flags = [tmp_path / "model.bin", "--prompt", "Once ", "--tokens", 20, "--threads", 2, "--temperature", 0]
    exact = text_of(capsys, *flags)
    assert sample.main([str(flag) for flag in (*flags, "--dtype", "bfloat16")]) == 0
    captured = capsys.readouterr()
    assert captured.out[:6] == exact[:6]
    assert "bfloat16" in captured.err


def test_the_script_as_a_program(tmp_path):
    """Text on standard output, all else on standard error, from tokens that a terminal of another encoding lacks."""
    llmc.write_parameters(tmp_path / "model.bin", new_parameters())
    command = [sys.executable, str(SCRIPTS / "sample.py"), str(tmp_path / "model.bin"), "--prompt", "für", "--tokens"]
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(SCRIPTS.parent), "PYTHONUTF8": "1"}
    result = subprocess.run([*command, "9"], capture_output=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"f?r")
    assert b"bytes tokens, computing on" in result.stderr
    assert b"tokens/s" in result.stderr


def test_pieces_come_with_their_tokens():
    text = "f\u00fcr 3 \u20ac \U0001f600!"
    drawn = []

    def tokens():
        for byte in text.encode():
            drawn.append(byte)
            yield byte

    pieces, found = text_pieces(tokens(), byte_encoding()), ""
    for piece in pieces:
        found += piece
        assert found == bytes(drawn).decode(errors="ignore"), "a character comes with its last byte, not later"
    assert found == text


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([0, 1, 2, 8, 4, 5, 6], "Hallo \u20ac"),
        ([0, 5, 1], "H\ufffda"),  # cut by another character
        ([0, 5], "H\ufffd"),  # by the end
        ([7, 7], "\ufffd\ufffd"),
        ([0, 1, 9, 0, 1], "Ha"),  # the document ends
    ],
    ids=str,
)
def test_tokens_of_several_bytes(tokens, text):
    assert "".join(text_pieces(tokens, WORDS)) == text


def test_a_prompt_of_documents_is_cut_where_it_is_asked_for():
    """The prompt fits into the context if each <|endoftext|> is one token, and not as ordinary text."""
    model = CachedGPT2(load_kernels("numpy", 1), new_parameters())
    drawn = model, byte_encoding(), "<|endoftext|>" * 3, 1, Sampling(), 1
    assert len(list(sample_text(*drawn, splits=True))) >= 1
    with pytest.raises(UserError):
        sample_text(*drawn)


def test_what_a_text_begins_with():
    assert document_start(WORDS).tolist() == [9]
    assert document_start(byte_encoding()).tolist() == [10]
    assert prompt_tokens("", byte_encoding()).tolist() == [10]
    assert prompt_tokens("\u20ac", byte_encoding()).tolist() == [0xE2, 0x82, 0xAC]
    text = "<|endoftext|>Ha<|endoftext|>"
    assert prompt_tokens(text, WORDS, splits=True).tolist() == [9, 0, 1, 9]
    assert prompt_tokens(text, byte_encoding(), splits=True).tolist() == list(b"\nHa\n")
    assert prompt_tokens(text, byte_encoding()).tolist() == list(text.encode())
    for encoding in (WORDS, byte_encoding()):
        with pytest.raises(UserError, match="not UTF-8"):
            prompt_tokens("Hal\udcff", encoding)


def test_only_the_tokenizers_tokens_are_drawn():
    """Of a model that has more: the others have the highest logits, and no bytes."""
    config = GPT2Config(1, 1, 8, 16, 300)
    parameters = new_parameters(1, config)
    parameters.lnf_bias[:] = 1.0
    parameters.wte[256:300] = 5.0
    kernels = load_kernels("numpy", 1)
    for sampling in (Sampling(0), Sampling(1.0, 0)):
        pieces = sample_text(CachedGPT2(kernels, parameters), byte_encoding(), "a", 20, sampling, 1)
        assert len(list(pieces)) == 21


def test_a_terminal_is_given_nothing_to_obey():
    assert printable("a\x1b[2J\tb\n\r\x00\x9b\x7f\u20ac") == "a\ufffd[2J\tb\n\ufffd\ufffd\ufffd\ufffd\u20ac"


def test_which_tokenizer(tmp_path, monkeypatch):
    run = new_run(tmp_path / "run", [7])
    monkeypatch.setattr(
        "scripts.settings.tokenizer.load_tokenizer", lambda name: {"gpt2": WORDS, "bytes": byte_encoding()}[name]
    )
    for path in (run, run / "checkpoints/step-00000007", run / "checkpoints/step-00000007/model.bin"):
        assert choose_tokenizer(None, path, 50257).name == "bytes"
        assert choose_tokenizer("gpt2", path, 50257) is WORDS
    (run / "config.json").write_text(json.dumps({"settings": {"tokenizer": None}}))  # it was given tokens
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for path in (run, tmp_path, tmp_path / "model.bin", None):
        assert choose_tokenizer(None, path, 50257) is WORDS
        assert choose_tokenizer(None, path, 256).name == "bytes"
        with pytest.raises(UserError, match=r"50304 tokens, expected 50257 or 256 .* --tokenizer"):
            choose_tokenizer(None, path, 50304)
    with pytest.raises(UserError, match="256 tokens, expected at most the model's 100"):
        choose_tokenizer("bytes", None, 100)


BAD = {
    "a long prompt": (["--prompt", "x" * 33], "the prompt has 33 tokens, expected 1 to 32, the model's context"),
    "a longer prompt": (
        ["--prompt", "x" * 17, "--seq-len", "16"],
        "the prompt has 17 tokens, expected 1 to 16, the le",
    ),
    "beyond the context": (["--seq-len", "33"], "--seq-len is 33, expected at most the model's context, 32: lower it"),
    "tokens": (["--tokens", "0"], "--tokens is 0, expected at least 1"),
    "seed": (["--seed", "-1"], "--seed is -1, expected at least 0"),
    "threads": (["--threads", "0"], "--threads is 0, expected at least 1"),
    "top-p": (["--top-p", "0"], "--top-p is 0.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_one_line(tmp_path, capsys, name):
    arguments, words = BAD[name]
    llmc.write_parameters(tmp_path / "model.bin", new_parameters())
    assert sample.main([str(tmp_path / "model.bin"), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"sample.py: error: {words}")
    assert captured.err.count("\n") == 1


def test_ctrl_c_and_a_reader_that_has_had_enough(tmp_path, capsys, monkeypatch):
    llmc.write_parameters(tmp_path / "model.bin", new_parameters())

    def interrupted(*_):
        yield "ab"
        raise KeyboardInterrupt

    monkeypatch.setattr("scripts.sample.sample_text", interrupted)
    assert sample.main([str(tmp_path / "model.bin")]) == 130
    assert capsys.readouterr().out == "ab\n"
    monkeypatch.undo()
    command = f"{sys.executable} {SCRIPTS / 'sample.py'} {tmp_path / 'model.bin'} --tokens 2000 | head -c 3"
    environment = {"PYTHONPATH": str(SCRIPTS.parent), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, shell=True, capture_output=True, env=environment, check=False)
    assert len(result.stdout) == 3
    assert b"rror" not in result.stderr
