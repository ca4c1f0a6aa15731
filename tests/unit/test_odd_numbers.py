"""Numbers that nobody means: each is refused with one line, before anything is planned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dist.world import lost_ranks
from gpt2.config import PRESETS
from gpt2.errors import UserError
from gpt2.formats import weights
from scripts.settings import units
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


@pytest.mark.parametrize("flag", FLAGS)
def test_none_and_less_than_none(flag):
    for number in ("0", "-1"):
        line = refused(flag, number)
        assert f"is {number}, expected" in line
        assert "\n" not in line


@pytest.mark.parametrize("flag", [*FLAGS, "--warmup", "--eval-every", "--eval-steps", "--threads", "--sample-every"])
def test_sizes_beyond_64_bits(flag):
    assert "expected" in refused(flag, str(2**63))
    assert "expected" in refused(flag, str(MOST + 1))


@pytest.mark.parametrize("flag", FLOATS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1", "1e-320", "1e300"])
def test_numbers_that_no_kernel_computes_with(flag, number):
    assert f"{flag} is {float(number)}" in refused(f"{flag}={number}")


@pytest.mark.parametrize("number", ["nan", "inf", "0", "-1", "1e-320", "1e300"])
def test_a_peak(number, capsys):
    with pytest.raises(SystemExit):
        parse_settings("", [f"--peak-tflops={number}"])
    assert "is not a number above 0" in capsys.readouterr().err


def test_usual_numbers_are_taken():
    flags = ["--lr", "1e-30", "--grad-clip", "0", "--seed", str(2**64 - 1), "--peak-tflops", "989", "--eps", "1e-8"]
    settings, _ = complete(parse_settings("", flags), 1)
    assert settings.seq_len == PRESETS["baby"].context


DEEP = replace(PRESETS["gpt2-1558M"], n_layer=10_000)


@pytest.mark.parametrize("flags", [[], ["--backend", "numpy"], ["--strategy", "auto"]], ids=str)
def test_a_model_beyond_the_memory_is_refused_before_it_is_planned(flags, monkeypatch):
    monkeypatch.setattr(weights, "available_bytes", lambda: 10**9)
    settings, _ = complete(parse_settings("", flags), 4)
    check_memory(settings, PRESETS["baby"], WORLD)
    with pytest.raises(UserError, match=r"GB or more on node0, expected at most the 1[.]0 GB"):
        check_memory(settings, DEEP, WORLD)


def test_a_batch_beyond_the_memory(monkeypatch):
    monkeypatch.setattr(weights, "available_bytes", lambda: 10**9)
    settings, config = complete(parse_settings("", ["--backend", "numpy", "--strategy", "ring"]), 4)
    check_memory(settings, config, WORLD)
    with pytest.raises(UserError, match="and --batch-size 100000 take"):
        check_memory(replace(settings, batch_size=100_000), config, WORLD)


@pytest.mark.parametrize("kind", [units.sizes, units.count_of, units.bits_per_s, units.duration_s])
def test_units_of_immense_numbers(kind):
    for number in ("9" * 400, "9" * 30):
        for unit in ("", "gbit", "s", "B"):
            with pytest.raises(units.UnitError):
                kind(number + unit)


@pytest.mark.parametrize("text", ["\u00b2", "", "-1", "2,2"])
def test_what_a_launcher_cannot_mean(text):
    assert lost_ranks(1, None, {"PMI_SIZE": text}) is None
    assert lost_ranks(1, None, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": text}) is None


def test_expected_ranks():
    assert "1 ranks, expected 0" in lost_ranks(1, 0, {})
