"""The notations that flags accept, and the one line for what they do not."""

import argparse
from fractions import Fraction
from functools import partial

import pytest

from scripts.settings import units
from scripts.settings.units import UnitError

pytestmark = pytest.mark.any_mpi
IMMENSE = "9" * 30
SMALL = partial(units.integer, low=2, high=4096)
READ = [
    (units.bits_per_s, {"400mbit": 4e8, "2.5gbit": 2.5e9, "800KBIT": 8e5, "1000bit": 1e3, "1Tbit": 1e12}),
    (units.bytes_per_s, {"400mbit": 5e7}),
    (units.core_count, {"0.4": 0.4, "2": 2.0, "0.01": 0.01}),
    (units.duration_s, {"20us": 20 * 1e-6, "1.5ms": 1.5e-3, "3ns": 3 * 1e-9, "2s": 2}),
    (units.count_of, {"124M": 124_000_000, "1.5b": 1_500_000_000, "7": 7, "2k": 2000}),
    (units.sizes, {"8MB,64mib": [8_000_000, 64 << 20], "8000000": [8_000_000], "1.5 K,2B": [1500, 2]}),
    (units.sizes, {"3KiB,1GiB": [3072, 1 << 30], "2GB": [2_000_000_000]}),
    (units.size_in_bytes, {"512KiB": 512 << 10, "600MB": 600_000_000}),
    (SMALL, {"1_000": 1000, "2": 2}),
    (units.percent, {"0.5": Fraction(1, 2), "10": 10}),
    (units.repetitions, {"7": 7}),
]
REFUSED = [
    (units.bits_per_s, ["fast", "400", "400 mbit", "0mbit", "0.5kbit", "-1mbit", "400mb", "400mbit\n"], "not a rate"),
    (units.bits_per_s, [IMMENSE + "gbit"], "is not a rate"),
    (units.core_count, ["", "0", "0.001", "4097", "-1", "nan", "all", "1e2"], "cores: expected 0.01 to 4096"),
    (units.duration_s, ["soon", "20", "20US", "-1s", "1 ms", IMMENSE + "s"], "is not a time"),
    (units.count_of, ["124X", "0", "0.1", "", "-5", IMMENSE, IMMENSE + "B"], "is not a count"),
    (units.sizes, ["8MB,pear", "0", "", "8MB,", "8IB", "-8MB", "8 M B", IMMENSE], "is not a list of sizes"),
    (units.size_in_bytes, ["pear", "", "8MB,8MB"], "is not a size: expected one"),
    (SMALL, ["1", "4097", "1__0", "1.5", "_7"], "expected an integer from 2 to 4096"),
    (units.percent, ["100", "-1", "0.1234567", "1e1"], "expected a number from 0 to below 100"),
    (units.repetitions, ["0", "-1", "two"], "expected 1 or more"),
]


@pytest.mark.parametrize(("read", "values"), READ, ids=lambda one: getattr(one, "__name__", ""))
def test_notations(read, values):
    assert {text: read(text) for text in values} == values


@pytest.mark.parametrize(("read", "texts", "says"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_other_text_is_refused_in_one_line(read, texts, says):
    for text in texts:
        with pytest.raises(UnitError, match=says) as error:
            read(text)
        assert repr(text) in str(error.value)
        assert "\n" not in str(error.value)


def test_argparse_prints_the_line(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", type=units.bytes_per_s)
    with pytest.raises(SystemExit):
        parser.parse_args(["--link", "fast"])
    assert "argument --link: 'fast' is not a rate: expected 1kbit or more" in capsys.readouterr().err
