"""What flags leave open is decided, and what means nothing is refused, before anything is made."""

import pytest

from gpt2.errors import UserError
from scripts.settings.checks import complete
from scripts.settings.training import parse_settings


def settings(*flags):
    return complete(parse_settings("", [*flags, "--out", "run"]), 2)


def test_what_is_left_open_follows_from_the_rest():
    made, config = settings("--lr", "0.002")
    assert made.min_lr == pytest.approx(0.0002)
    assert (made.seq_len, made.tokenizer) == (config.context, "bytes")
    assert settings("--lr", "0.002", "--min-lr", "0.001")[0].min_lr == 0.001


def test_the_corpus_is_named_where_no_other_text_is():
    assert settings()[0].corpus == "shakespeare"
    assert settings("--corpus", "python")[0].corpus == "python"
    assert settings("--text", "my.txt")[0].corpus is None
    assert settings("--train-data", "tokens.bin")[0].corpus is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--corpus", "python", "--text", "my.txt"], "--corpus and --text were both given: use one of them"),
        (["--corpus", "python", "--train-data", "a.bin"], "--corpus and --train-data were both given"),
        (["--context", "16", "--seq-len", "17"], "--seq-len is 17, expected at most the model's context, 16"),
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
