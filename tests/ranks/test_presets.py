"""train.py --preset: the recipes' own figures, whatever the number of ranks."""

import json

import numpy as np
import pytest

from dist.world import world_of
from gpt2.data.shards import write_shard
from gpt2.errors import UserError
from scripts.settings import presets
from scripts.settings.checks import complete
from scripts.settings.training import parse_settings
from tests.support.in_process import alone, log, train

pytestmark = pytest.mark.any_mpi
# Of llm.c's scripts/run_gpt2_124M.sh, and of nanoGPT's README and the file of settings that its command names.
LLMC = "-v 250 -s 20000 -b 64 -t 1024 -d 524288 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -e d12"
NANOGPT = (
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 "
    "--eval_interval=250 --learning_rate=1e-3 --min_lr=1e-4 --beta2=0.99 --warmup_iters=100"
)
FINEWEB = "--preset llmc-fineweb-124M --train-data a --val-data b"
SHAKESPEARE = "--preset nanogpt-shakespeare --text a"


def settings_of(flags: str, ranks: int):
    return complete(parse_settings("", flags.split()), ranks)


@pytest.mark.parametrize(("ranks", "batch_size", "grad_accum"), [(1, 64, 8), (8, 64, 1), (32, 16, 1), (2, 64, 4)])
def test_llmcs_recipe(ranks, batch_size, grad_accum):
    words = LLMC.split()
    letters = dict(zip(words[::2], words[1::2], strict=True))
    s, config = settings_of(FINEWEB, ranks)
    assert (s.batch_size, s.grad_accum) == (batch_size, grad_accum)
    assert s.batch_size * s.grad_accum * s.seq_len * ranks == int(letters["-d"])
    assert s.batch_size <= int(letters["-b"])
    found = (s.eval_every, s.sample_every, s.checkpoint_every, s.seq_len, s.warmup)
    assert found == tuple(int(letters[letter]) for letter in ("-v", "-s", "-n", "-t", "-u"))
    assert (s.lr, s.weight_decay, s.min_lr / s.lr) == tuple(float(letters[letter]) for letter in ("-l", "-c", "-q"))
    # What the script does not say: train_gpt2.cu's own; 18,865 is in the script's first lines.
    assert (s.beta1, s.beta2, s.eps, s.grad_clip, s.eval_steps, s.schedule) == (0.9, 0.95, 1e-8, 1.0, 20, "cosine")
    assert (s.steps, s.preset, s.skip_outliers) == (18_865, "llmc-fineweb-124M", 0)
    assert (config.n_layer, config.n_embd, config.context, config.vocab_size) == (12, 768, 1024, 50257)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_nanogpts_recipe(ranks, batch_size):
    flags = {name: float(number) for name, number in (word[2:].split("=") for word in NANOGPT.split())}
    s, config = settings_of(SHAKESPEARE, ranks)
    assert (s.batch_size, s.grad_accum) == (batch_size, 1)
    assert s.batch_size * ranks == flags["batch_size"]
    shape = (config.n_layer, config.n_head, config.n_embd, s.seq_len)
    assert shape == tuple(flags[name] for name in ("n_layer", "n_head", "n_embd", "block_size"))
    found = (s.steps, s.eval_every, s.lr, s.min_lr, s.beta2, s.warmup)
    expected = ("max_iters", "eval_interval", "learning_rate", "min_lr", "beta2", "warmup_iters")
    assert found == tuple(flags[name] for name in expected)
    assert (s.weight_decay, s.beta1, s.grad_clip, s.schedule) == (0.1, 0.9, 1.0, "cosine")


def test_flags_override_a_preset():
    s, _ = settings_of(f"{FINEWEB} --lr 1e-5 --steps 10 --batch-size 16", 8)
    assert (s.lr, s.steps, s.batch_size, s.grad_accum, s.warmup) == (1e-5, 10, 16, 4, 700)
    assert settings_of(f"{SHAKESPEARE} --lr 2e-5", 1)[0].min_lr == pytest.approx(2e-6)  # a tenth, as the preset's own
    assert settings_of(f"{SHAKESPEARE} --lr 2e-5 --min-lr 1e-5", 1)[0].min_lr == 1e-5
    assert settings_of(f"{FINEWEB} --grad-accum 2", 8)[0].batch_size == 32
    s, _ = settings_of(f"{FINEWEB} --batch-size 3 --grad-accum 5", 7)
    assert (s.batch_size, s.grad_accum) == (3, 5)
    assert settings_of(f"{FINEWEB} --seq-len 256", 8)[0].grad_accum == 4
    s, _ = settings_of(f"{FINEWEB} --strategy reduce-bcast --server dedicated", 9)  # eight compute
    assert (s.batch_size, s.grad_accum) == (64, 1)


def test_without_a_preset_the_batch_is_each_ranks_own():
    for ranks in (1, 5):
        s, _ = settings_of("", ranks)
        assert (s.batch_size, s.grad_accum, s.preset) == (4, 1, None)


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (FINEWEB, 3, "takes 524288 tokens a step, 512 sequences, not divisible among 3 computing ranks: start a"),
        (SHAKESPEARE, 5, "takes 768 tokens a step, 12 sequences, not divisible among 5"),
        (f"{FINEWEB} --batch-size 48", 8, "64 sequences for each rank, not divisible by --batch-size 48"),
        (f"{FINEWEB} --grad-accum 3", 8, "64 sequences for each rank, not divisible by --grad-accum 3"),
        (f"{FINEWEB} --seq-len 1000", 8, "not divisible into sequences of 1000: choose another --seq-len"),
        (f"{FINEWEB} --batch-size 0", 8, "--batch-size is 0, expected a number of at least 1"),
        ("--preset llmc-fineweb-124M --train-data a", 8, "without --val-data, expected FineWeb's fineweb_val_*.bin"),
        ("--preset nanogpt-shakespeare", 2, "without --text, expected tinyshakespeare.txt: add --text PATH"),
    ],
)
def test_what_does_not_divide_or_is_missing(flags, ranks, message):
    with pytest.raises(UserError) as caught:
        settings_of(flags, ranks)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_number_of_ranks_keeps_the_global_batch():
    for name, preset in presets.KNOWN_RUNS.items():
        flags = " ".join(f"--{need.replace('_', '-')} a" for need in preset.needs)
        for ranks in range(1, 65):
            try:
                s, _ = settings_of(f"--preset {name} {flags}", ranks)
            except UserError:
                assert preset.tokens_per_step % (preset.settings["seq_len"] * ranks)
            else:
                assert s.batch_size * s.grad_accum * ranks * s.seq_len == preset.tokens_per_step


@pytest.mark.ranks(3)
def test_the_same_losses_on_any_number_of_ranks(comm, shared_path):
    """Of the baby, three steps of a text of letters, beside one serial rank."""
    text = shared_path / "a.txt"
    if comm.rank == 0:
        text.write_text("what the wind has written on the water\n" * 200)
    comm.Barrier()
    flags = ("--preset", "nanogpt-shakespeare", "--text", text, "--steps", 3)
    train(world_of(comm, comm.Split(0, comm.rank)), shared_path / "all", *flags)
    if comm.rank == 0:
        train(alone(), shared_path / "alone", *flags)
    comm.Barrier()
    found, expected = ([line["loss"] for line in log(shared_path / name)] for name in ("all", "alone"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.ranks(2)
def test_a_small_run_of_the_large_one(comm, shared_path):
    """Its optimizer, schedule and files, on a model and a batch that fit here; config.json says where they are from."""
    if comm.rank == 0:
        tokens = np.random.default_rng(0).integers(0, 50257, 4000)
        for split in ("train", "val"):
            write_shard(shared_path / f"fineweb_{split}_000001.bin", tokens.astype(np.uint16))
    comm.Barrier()
    data = [f"--{split}-data={shared_path}/fineweb_{split}_*.bin" for split in ("train", "val")]
    small = "--model tiny --seq-len 32 --batch-size 2 --grad-accum 2 --steps 3 --eval-steps 1 --sample-every 0"
    train(
        world_of(comm, comm.Split(0, comm.rank)), shared_path / "run", "--preset", "llmc-fineweb-124M", *data,
        *small.split(),
    )  # fmt: skip
    lines = log(shared_path / "run")
    assert [line["lr"] for line in lines] == pytest.approx([6e-4 * step / 700 for step in (1, 2, 3)])
    assert [line["tokens"] for line in lines] == [256, 512, 768]  # 2 ranks, 2 micro-steps of 2 x 32
    assert "val_loss" in lines[-1]
    settings = json.loads((shared_path / "run" / "config.json").read_text())["settings"]
    assert settings["preset"] == "llmc-fineweb-124M"
    assert (settings["model"], settings["weight_decay"], settings["checkpoint_every"]) == ("tiny", 0.1, 5000)
