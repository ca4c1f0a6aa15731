"""Numbers that nobody means: each is refused with one line, before anything is planned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dist.world import lost_ranks
from gpt2.config import PRESETS
from gpt2.errors import UserError
from scripts.settings import memory
from scripts.settings.checks import MOST, complete
from scripts.settings.memory import check_memory
from scripts.settings.training import parse_settings

pytestmark = pytest.mark.any_mpi
WORLD = SimpleNamespace(local_size=2, size=4, node_count=2, host="node0")


def refused(*flags):
    """The one line, without starting a rank."""
    settings = parse_settings("", [*flags])
    with pytest.raises(UserError) as caught:
        complete(settings, 1)
    return str(caught.value)


FLAGS = [
    "--batch-size", "--seq-len", "--grad-accum", "--steps", "--context", "--vocab-size", "--n-layer", "--n-head",
    "--n-embd", "--keep",
]  # fmt: skip
FLOATS = ["--lr", "--min-lr", "--weight-decay", "--eps", "--grad-clip", "--skip-outliers", "--stall-after"]


@pytest.mark.parametrize("flag", [*FLAGS, "--warmup", "--eval-every", "--eval-steps", "--threads", "--sample-every"])
def test_counts_out_of_range(flag):
    for number in (0, -1) if flag in FLAGS else (-1,):
        line = refused(flag, str(number))
        assert f"is {number}, expected" in line
        assert "\n" not in line
    for number in (MOST + 1, 2**63):
        assert "expected" in refused(flag, str(number))


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1", "1e-320", "1e300"])
def test_numbers_that_no_kernel_computes_with(number, capsys):
    for flag in FLOATS:
        assert f"{flag} is {float(number)}" in refused(f"{flag}={number}")
    with pytest.raises(SystemExit):
        parse_settings("", [f"--peak-tflops={number}"])
    assert "is not a number above 0" in capsys.readouterr().err


def test_usual_numbers_are_taken():
    flags = ["--lr", "1e-30", "--grad-clip", "0", "--seed", str(2**64 - 1), "--peak-tflops", "989", "--eps", "1e-8"]
    settings, _ = complete(parse_settings("", flags), 1)
    assert settings.seq_len == PRESETS["baby"].context


DEEP = replace(PRESETS["gpt2-1558M"], n_layer=10_000)


@pytest.mark.parametrize("flags", ["", "--backend numpy", "--strategy auto", "--backend numpy --strategy ring"])
def test_a_model_or_a_batch_beyond_the_memory_is_refused_before_it_is_planned(flags, monkeypatch):
    """While strategy or backend are open, the batch is not known to be too large."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**9)
    settings, config = complete(parse_settings("", flags.split()), 4)
    check_memory(settings, config, WORLD)
    with pytest.raises(UserError, match=r"GB or more on node0, expected at most the 1[.]0 GB"):
        check_memory(settings, DEEP, WORLD)
    if settings.strategy == "ring":
        with pytest.raises(UserError, match="and --batch-size 100000 take"):
            check_memory(replace(settings, batch_size=100_000), config, WORLD)


@pytest.mark.parametrize("text", ["\u00b2", "", "-1", "2,2"])
def test_what_a_launcher_cannot_mean(text):
    assert lost_ranks(1, None, {"PMI_SIZE": text}) is None
    assert lost_ranks(1, None, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": text}) is None
    assert "1 ranks, expected 0" in lost_ranks(1, 0, {"PMI_SIZE": text})
