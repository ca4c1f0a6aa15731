"""What flags leave open is decided, and what means nothing is refused, before anything is made."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from gpt2.config import PRESETS, GPT2Config
from gpt2.data.shards import write_shard
from gpt2.data.tokenizers import byte_encoding
from gpt2.errors import UserError
from gpt2.formats import checkpoint_files, checkpoints, huggingface_export, llmc
from gpt2.parameters import Layout, Parameters
from scripts.settings.checks import complete
from scripts.settings.derived import doubtful_warmup
from scripts.settings.training import GROUPS, flags, parse_settings

SHAPE = replace(PRESETS["tiny"], vocab_size=300)


def settings(*flags):
    return complete(parse_settings("", [*flags, "--out", "run"]), 2)


def test_what_is_left_open_follows_from_the_rest():
    made, config = settings("--lr", "0.002")
    assert made.min_lr == pytest.approx(0.0002)
    assert (made.seq_len, made.tokenizer) == (config.context, "bytes")
    assert settings("--lr", "0.002", "--min-lr", "0.001")[0].min_lr == 0.001


def test_int8_feeds_errors_back_unless_told_otherwise():
    said = ["float32"], ["bfloat16"], ["bfloat16", "--error-feedback"], ["int8"], ["int8", "--no-error-feedback"]
    for strategy in "auto", "hierarchical":
        fed = [settings("--strategy", strategy, "--wire", *wire)[0].error_feedback for wire in said]
        assert fed == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split-documents", "--train-data", "a.bin"], "--split-documents without --text"),
        (["--context", "16", "--seq-len", "17"], "--seq-len is 17, expected at most the model's context, 16"),
        (["--global-batch-size", "12"], "--global-batch-size 12, expected a multiple of 8, the sequences of"),
        (["--global-batch-size", "16", "--grad-accum", "2"], "--global-batch-size 16 with --grad-accum"),
        (["--tokens", "300", "--steps", "3"], "--tokens with --steps, which also sets it: leave one of them out"),
        (["--tokens", "1T", "--batch-size", "1", "--context", "16"], "--tokens 1000000000000 is 31250000000 steps of"),
        (["--minutes", "-1"], "--minutes is -1.0, expected a number of at least 0"),
        (["--global-batch-size", "0"], "--global-batch-size is 0"),
        (["--log-every", "0"], "--log-every is 0"),
        (["--lr", "1e-4", "--min-lr", "1e-3"], "--min-lr is 0.001, expected at most --lr, 0.0001: lower it, or leave"),
        (["--trace", "50:60", "--steps", "30"], "--trace 50:60 begins after the last step, 30: choose earlier steps"),
        (["--trace", "3:4", "--tokens", "1K"], "--trace 3:4 begins after the last step, 2"),
        (["--eps", "0"], "--eps is 0, expected a number above 0: AdamW divides by it where a parameter has no grad"),
        (["--eps=-1"], "--eps is -1.0, expected a number of at least 1.2e-38"),
        (["--beta1", "1"], "--beta1 is 1.0, expected at least 0 and below 1"),
        (["--beta2", "-0.1"], "--beta2 is -0.1, expected at least 0 and below 1"),
    ],
)
def test_a_number_that_means_nothing_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        settings(*flags)


def test_the_ends_of_the_ranges_are_allowed():
    made, _ = settings("--context", "16", "--seq-len", "16", "--beta1", "0", "--beta2", "0.9999")
    assert (made.seq_len, made.beta1, made.beta2) == (16, 0, 0.9999)
    assert settings("--trace", "30:60", "--steps", "30")[0].trace == "30:60"
    assert settings("--trace", "off", "--steps", "1")[0].trace == "off"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--steps 20", ""),
        ("--steps 10", ""),
        ("--steps 10 --warmup 20", "--warmup 20 is above --steps 10: the learning rate ends at 0.0005"),
        ("--tokens 5K --warmup 20", "--warmup 20 is above --steps 10: the learning rate ends at 0.0005"),
        ("--preset nanogpt-shakespeare --text a --steps 50",
         "--warmup 100 is above --steps 50: the learning rate ends at 0.0005"),
        ("--steps 50 --lr-steps 21", ""),
        ("--steps 50 --lr-steps 20", "--warmup 20 ends after --schedule cosine has begun to lower the learning rate "
         "(--lr-steps 20): it drops from 0.001 to 0.0001 at once"),
        ("--steps 50 --lr-steps 20 --schedule constant", ""),
        ("--steps 25 --schedule wsd", ""),
        ("--steps 24 --schedule wsd", "--warmup 20 ends after --schedule wsd has begun to lower the learning rate "
         "(--lr-steps 24): it drops from 0.001 to 0.000431 at once"),
    ],
)  # fmt: skip
def test_a_warmup_that_is_rarely_meant_is_told(flags, line):
    told = doubtful_warmup(settings(*flags.split())[0])
    assert told.removesuffix(", below --lr 0.001") == line


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of 2 layers and 4 heads in each format."""
    folder = tmp_path_factory.mktemp("models")
    layout = Layout(SHAPE)
    parameters = Parameters.zeros(layout)
    llmc.write_parameters(folder / "llmc", parameters)
    huggingface_export.write_parameters(folder / "huggingface", parameters)
    part = folder / "run" / "checkpoints" / "step-00000001.part"
    part.mkdir(parents=True)
    ranges = [(array, 0, parameters.flat[: layout.count]) for array in checkpoints.STATE]
    size = checkpoint_files.write_part(part, 1, 0, ranges, "run")
    files = {checkpoint_files.rank_file(0): size}
    checkpoints.complete(part, {"run": "run", "step": 1} | checkpoints.model_facts(layout), files)
    return folder


@pytest.mark.parametrize("form", ["llmc", "huggingface", "run"])
def test_a_shape_that_is_not_that_of_init_is_refused(models, form):
    """Heads, too, which no tensor's shape shows. A vocabulary that the tokenizer has raised belongs to the name."""
    init = ["--init", str(models / form), "--tokenizer", "bytes"]
    for asked in ("", "--model tiny", "--model tiny --n-head 4", "--n-layer 2 --vocab-size 300"):
        assert settings(*init, *asked.split())[1] == SHAPE
    refused = {
        "--n-head 2": "--n-head 2 with --init .*, expected n_head 2, found n_head 4: leave it out",
        "--vocab-size 256": "--vocab-size 256 with --init .*, expected vocab_size 256, found vocab_size 300",
        "--context 32": "--context 32 with --init .*, expected context 32, found context 64: leave it out",
        "--model baby": "--model baby with --init .*, expected n_layer 4, n_embd 128, found n_layer 2, n_embd 64: l",
        "--model gpt2": "--model gpt2-124M with --init .*, expected n_layer 12, n_head 12, n_embd 768, context 1024",
        "--model tiny --n-layer 3": "^--n-layer 3 with --init .*, expected n_layer 3, found n_layer 2",
        "--preset nanogpt-shakespeare --text a": "--preset nanogpt-shakespeare with .*: give the model's shape",
    }
    for asked, message in refused.items():
        with pytest.raises(UserError, match=message):
            settings(*init, *asked.split())
    assert settings(*init, "--preset", "nanogpt-shakespeare", "--text", "a", "--model", "tiny")[1] == SHAPE


@pytest.mark.parametrize(("cut", "micro_steps"), [((), 3), (("--pipeline-parallel", "2"), 6)])
def test_micro_steps_follow_from_the_global_batch(cut, micro_steps):
    """Two ranks are two copies of the model, or the two stages of one."""
    made, _ = settings("--global-batch-size", "12", "--batch-size", "2", *cut)
    assert (made.batch_size, made.grad_accum) == (2, micro_steps)


@pytest.mark.parametrize(("name", "layers"), [("gpt2", 12), ("gpt2-medium", 24), ("gpt2-large", 36), ("gpt2-xl", 48)])
def test_models_have_the_names_that_others_give_them(name, layers):
    made, config = settings("--model", name, "--context", "64")
    assert made.model in PRESETS
    assert config.n_layer == layers


def test_help_has_a_group_for_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse_settings("what it does", ["--help"])
    own, *groups = re.split(r"^(?=\S.*:$)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert re.findall(r"^  (-\S+)", own, re.MULTILINE) == ["-h,"]
    assert [group.partition(":")[0] for group in groups] == list(GROUPS.values())
    shown = [re.findall(r"^  --(\S+?),?(?:\s|$)", group, re.MULTILINE) for group in groups]
    assert [flag for group in shown for flag in group] == [item.name.replace("_", "-") for item in flags()]
    assert max(map(len, shown)) <= 14, "a group that is longer hides what it holds"


def test_tokens_settle_the_steps_and_the_schedule():
    """Two ranks with two micro-steps of three windows of sixteen tokens: 192 a step; the last step is whole."""
    shape = ("--context", "16", "--batch-size", "3", "--grad-accum", "2")
    for tokens, steps in (("192", 1), ("193", 2), ("1.92K", 10), ("2M", 10417)):
        made, _ = settings("--tokens", tokens, *shape)
        assert (made.steps, made.lr_steps) == (steps, steps)
    assert settings("--tokens", "1.92K", "--lr-steps", "7", *shape)[0].lr_steps == 7
    made, _ = settings("--tokens", "1.92K", "--global-batch-size", "24", "--batch-size", "3", "--context", "16")
    assert made.steps == 5


def model(vocab_size: int) -> Parameters:
    return Parameters.zeros(Layout(GPT2Config(1, 1, 8, 64, vocab_size)))


@pytest.fixture(scope="module")
def models_by_name(tmp_path_factory):
    """Models by name, and shards of bytes with prepare.py's manifest beside them."""
    folder = tmp_path_factory.mktemp("models")
    step = folder / "run" / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    llmc.write_parameters(step / "model.bin", model(50304))
    (step / checkpoints.MARKER).write_text("{}")
    (folder / "run" / "config.json").write_text(json.dumps({"settings": {"tokenizer": "gpt2"}}))
    shutil.copytree(folder / "run", folder / "checkpoints" / "run")
    for size in (256, 777, 50257):
        llmc.write_parameters(folder / f"{size}.bin", model(size))
    for name in ("bytes", "other"):
        huggingface_export.write_parameters(folder / name, model(50257), tokenizer=byte_encoding())
    (folder / "other" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"der": 0, "die": 1}}}))
    (folder / "shards").mkdir()
    write_shard(folder / "shards" / "a.bin", range(256))
    (folder / "shards" / "manifest.json").write_text(json.dumps({"tokenizer": "bytes"}))
    write_shard(folder / "b.bin", range(256))
    return folder


@pytest.mark.parametrize(
    ("flags", "tokenizer"),
    [
        ("--init run --text my.txt", "gpt2"),
        ("--init run/checkpoints/step-00000001/model.bin --text my.txt", "gpt2"),
        ("--init run", "gpt2"),
        ("--init checkpoints/run", "gpt2"),
        ("--init checkpoints/run/checkpoints/step-00000001", "gpt2"),
        ("--init run --tokenizer bytes", "bytes"),
        ("--init 50257.bin --text my.txt", "gpt2"),
        (
            "--preset nanogpt-shakespeare --init 50257.bin --text a --n-layer 1 --n-head 1 --n-embd 8 --context 64",
            "gpt2",
        ),
        ("--init 256.bin", "bytes"),
        ("--init bytes --text my.txt", "bytes"),
        ("--init bytes/model.safetensors", "bytes"),
        ("--text my.txt", "bytes"),
        ("--text my.txt --vocab-size 128 --tokenizer bytes", "bytes"),
        ("--init run --train-data b.bin", "gpt2"),
        ("--init 50257.bin --train-data b.bin", "gpt2"),
        ("--init 777.bin --train-data b.bin", None),
        ("--init other --train-data b.bin", "other"),
        ("--init run --train-data shards/a.bin --tokenizer bytes", "bytes"),
        ("--train-data b.bin", None),
        ("--train-data shards/*.bin", "bytes"),
        ("--train-data b.bin --vocab-size 50304 --tokenizer gpt2", "gpt2"),
        ("--out run --resume --text my.txt", "gpt2"),
        ("--out run --resume --init 50257.bin --text my.txt", "gpt2"),
        ("--train-data b.bin --vocab-size 300 --tokenizer gpt2", "50257 tokens, expected at most the model's 300"),
        ("--init 777.bin --text my.txt", "a model of 777 tokens, expected 50257 or 256 to tell its tokenizer"),
        ("--init 256.bin --text my.txt --tokenizer gpt2", "50257 tokens, expected at most the model's 256"),
        ("--init other --text my.txt", "other: its tokenizer is unknown, expected gpt2 or bytes"),
        ("--init run --train-data shards/a.bin", "a.bin: tokens made with tokenizer bytes, expected the model's, gpt2"),
        ("--init 50257.bin --train-data shards/a.bin", "tokens made with tokenizer bytes, expected the model's, gpt2"),
        ("--init run --train-data b.bin --val-data shards/a.bin", "shards/a.bin: tokens made with tokenizer bytes"),
        ("--train-data shards/a.bin --tokenizer gpt2", "shards/a.bin: tokens made with tokenizer bytes"),
    ],
)
def test_a_run_has_the_tokenizer_of_the_model_that_it_starts_from(models_by_name, monkeypatch, flags, tokenizer):
    monkeypatch.chdir(models_by_name)
    given = parse_settings("", flags.split())
    if tokenizer and " " in tokenizer:
        with pytest.raises(UserError, match=tokenizer):
            complete(given, 2)
        return
    made, config = complete(given, 2)
    assert made.tokenizer == tokenizer
    if given.resume:
        assert config.vocab_size >= 50257, "a run that goes on keeps its vocabulary"
