"""--split-embedding: where it pays, where it cannot be, and what a run that goes on does."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from dist.buffers import OwnBuffers
from dist.cost.sparse_rows import Rows
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from scripts.settings.checks import complete
from scripts.settings.memory import bytes_of_rows
from scripts.settings.split_embedding import expected_rows, is_split, most_rows, rows_of_text, used_rows
from scripts.settings.training import parse_settings
from strategies.hierarchical_sharded import all_reduced_share

OVERLAPPED = ["--strategy", "hierarchical-sharded", "--overlap"]
ON = ["--split-embedding", "on"]


def settings(*flags, ranks=2):
    return complete(parse_settings("", [*map(str, flags), "--out", "run"]), ranks)


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (OVERLAPPED, 1, "one rank exchanges nothing"),
        (OVERLAPPED[:2], 2, "without --overlap nothing is computed beside an exchange"),
        (["--strategy", "zero-2", "--overlap"], 2, "--strategy zero-2 exchanges whole ranges, ring"),
        ([*OVERLAPPED, "--tensor-parallel", 2], 4, "ranks that share a model have the table and the head"),
        ([*OVERLAPPED, "--backend", "cupy"], 2, "looked-up rows are exchanged in host memory, not between GPUs"),
    ],
)
def test_a_split_that_cannot_be_is_refused_in_one_line_or_left_out(flags, ranks, message):
    with pytest.raises(UserError, match=f"--split-embedding on: {message}.*: leave it out, or use auto"):
        settings(*flags, *ON, ranks=ranks)
    made, _ = settings(*flags, ranks=ranks)
    split, why = is_split(made, ranks, 10, 1000, None)
    assert not split
    assert why.startswith(message)


def test_few_rows_of_many_pay():
    made, _ = settings(*OVERLAPPED)
    assert is_split(made, 2, 500, 1000, None) == (True, "a step looks up 500 of 1,000 rows")
    assert not is_split(made, 2, 501, 1000, None)[0]
    assert is_split(replace(made, split_embedding="on"), 2, 501, 1000, None)[0]
    assert not is_split(replace(made, split_embedding="off"), 2, 1, 1000, True)[0]


@pytest.mark.parametrize("before", [False, True])
def test_a_run_goes_on_as_it_was(before):
    made, _ = settings(*OVERLAPPED)
    for rows in (1, 999):
        assert is_split(made, 2, rows, 1000, before) == (before, f"as before; a step looks up {rows} of 1,000 rows")


def test_rows_are_counted():
    made, config = settings(*OVERLAPPED, "--batch-size", 2, "--grad-accum", 3, "--seq-len", 4, "--vocab-size", 1000)
    assert most_rows(made, config) == 2 * 3 * 5
    made, config = settings(*OVERLAPPED, "--batch-size", 40, "--seq-len", 40, "--vocab-size", 1000)
    assert most_rows(made, config) == config.padded_vocab_size
    ids = [np.array(some) for some in ([1, 2], [2, 3, 4], [2])]
    comm = SimpleNamespace(allgather=lambda own: ids)
    world = SimpleNamespace(comm=comm, node_count=2, places=[{"node": node} for node in (0, 0, 1)])
    assert used_rows(ids[0], world) == {"of_ranks": [2, 3, 1], "of_nodes": [4, 1], "any": 4}


def test_the_memory_of_rows_is_theirs_and_a_few_segments():
    flags = "--batch-size", 2, "--seq-len", 100, "--context", 100, "--vocab-size", 5000, "--n-head", 1, "--n-embd", 640
    made, config = settings(*OVERLAPPED, *flags)
    ((ids, values),) = (
        OwnBuffers(None, 1).new_sparse_gradient((config.padded_vocab_size, 640), most_rows(made, config))._memory
    )
    assert values.nbytes == 2 * 101 * 640 * 4
    segments = 6 * 102 * 640 * 4  # of 256 KiB
    assert bytes_of_rows(made, config, 2) == values.nbytes + ids.nbytes + segments + 3 * 4 * 2 * 202
    assert bytes_of_rows(made, config, 1) == bytes_of_rows(replace(made, split_embedding="off"), config, 2) == 0


def test_what_a_text_looks_up_is_expected_before_any_data():
    """2 ranks and 1. All of a few tokens differ, of many about 44 times their root."""
    flags = "--batch-size", 2, "--seq-len", 4, "--vocab-size", 1000, "--n-embd", 64
    made, config = settings(*OVERLAPPED, *flags, ranks=3)
    assert expected_rows(made, config, 3, [0, 0, 1]) == Rows(64, (10, 10, 10), (20, 10), 30)
    assert rows_of_text(4096, replace(config, vocab_size=50000), [0, 1]).of_nodes == (2591, 2591)
    many = replace(made, batch_size=500)
    assert expected_rows(many, config, 3, [0, 0, 1]) is None, "more than half of the vocabulary"
    most = config.padded_vocab_size
    assert expected_rows(replace(many, split_embedding="on"), config, 3, [0, 0, 1]).any == most
    assert expected_rows(replace(made, overlap=False), config, 3, [0, 0, 1]) is None


def test_the_tokens_of_windows_are_inputs_and_targets():
    windows = Windows([np.array([5, 5, 1, 7, 3, 2, 9, 9, 8], np.uint16)], 2)
    assert windows.tokens(0, 2).tolist() == [1, 3, 5, 7]
    assert windows.tokens(1, 1).tolist() == [1, 3, 7]
    assert windows.tokens(1, 1).dtype == np.int32


@pytest.mark.parametrize(("head", "share"), [(0.0, "1/3"), (1 / 3, "1/2"), (0.64, "11/12"), (0.9, "1")])
def test_a_third_of_all_is_all_reduced(head, share):
    assert all_reduced_share(head) == Fraction(share)
