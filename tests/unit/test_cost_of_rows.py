"""A split embedding in the cost model: bytes and seconds of its rows, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dist.cost.model import Cluster, predict_rows
from dist.cost.overlap import BUCKET_BYTES, Training, of_buckets
from dist.cost.sparse_rows import Rows, node_rows_everywhere, node_rows_to_owners, rows_everywhere
from dist.cost.stages import node_traffic
from gpt2.config import GPT2Config
from gpt2.parameters import Layout
from scripts.prediction.predictor import predicted_step
from scripts.prediction.run_prediction import rows_of
from strategies import STRATEGIES

ROWS = Rows(3, (8, 7, 6), (10, 6), 12)  # of 12 bytes, 16 with their numbers
PLACEMENT, RATE = [0, 0, 1], 50e6
SHARDED = STRATEGIES["hierarchical-sharded"]


def traffic(messages, rows=ROWS):
    into, out = node_traffic(messages(np.array(PLACEMENT), rows), PLACEMENT)
    return into.tolist(), out.tolist()


def test_rows_go_to_their_owners_and_come_back():
    """Of two nodes each owns half: 5 and 3 rows go there and back again, which are asked for by their numbers."""
    assert traffic(node_rows_to_owners) == ([48 + 4 * 3 + 60, 80 + 4 * 5 + 36], [80 + 4 * 5 + 36, 48 + 4 * 3 + 60])


def test_sums_go_to_all():
    """6 rows of sums from each node; among three ranks 4 from each, and a third of every rank's to each owner."""
    assert traffic(node_rows_everywhere) == ([48 + 96, 80 + 96], [80 + 96, 48 + 96])
    ranks = replace(ROWS, of_ranks=(9, 6, 3))
    assert traffic(rows_everywhere, ranks) == ([2 * 16 + 2 * 64, 48 + 32 + 2 * 64], [48 + 32 + 2 * 64, 2 * 16 + 2 * 64])


def test_of_many_nodes_each_carries_as_much(monkeypatch):
    """As far as all look up alike."""
    placement, rows = np.arange(9), Rows(3, (90,) * 9, (90,) * 9, 540)
    for messages in (node_rows_to_owners, node_rows_everywhere, rows_everywhere):
        each = np.array(node_traffic(messages(placement, rows), placement.tolist()))
        monkeypatch.setattr("dist.cost.sparse_rows.MOST_MEMBERS", 8)
        few = messages(placement, rows)
        assert all(len(stage.size) == 9 for stage in few)
        np.testing.assert_allclose(node_traffic(few, placement.tolist()), each, rtol=0.01)
        monkeypatch.undo()


def test_rows_take_the_time_of_their_bytes_and_of_messages_that_wait_for_one_another():
    rows = Rows(999, (1000, 1000), (1000, 1000), 1500)
    cluster = Cluster([0, 1], RATE, RATE, 1e-3, nominal=False, add_rate=1e15)
    assert predict_rows(node_rows_to_owners, cluster, rows, "mpich").seconds == pytest.approx(2 * 2e6 / RATE + 6e-3)
    assert predict_rows(node_rows_everywhere, cluster, rows, "mpich").seconds == pytest.approx(5e6 / RATE + 6e-3)
    assert predict_rows(rows_everywhere, Cluster([0], RATE, RATE, 1.0), rows, "mpich").seconds == 0.0


def test_a_whole_embedding_shows_and_a_split_one_shows_its_rows():
    """Half of the vector is the embedding's; 10 s of computing hide all that may hide."""
    count, rows = 10 * BUCKET_BYTES, Rows(999, (1000, 1000), (1000, 1000), 1500)
    cluster = Cluster([0, 1], RATE, RATE, 0.0, nominal=False, add_rate=1e15)
    training = Training(count, 10.0, ranges=(count // 2, count // 2))
    whole, split = (predicted_step(SHARDED, cluster, replace(training, rows=some), "mpich") for some in (None, rows))
    exchange_s = 4 * count / RATE
    assert whole.step_s == split.step_s == pytest.approx(10 + exchange_s)
    assert whole.overlapped_s == pytest.approx(10 + exchange_s / 2)
    assert split.overlapped_s == pytest.approx(10 + exchange_s / 40 + 2 * 2e6 / RATE)
    assert split.scaled(2.0).overlapped_s == pytest.approx(10 + exchange_s / 20 + 4 * 2e6 / RATE)
    sliced = predicted_step(STRATEGIES["sliced"], cluster, replace(training, rows=rows), "mpich")
    assert sliced.rows is None, "it exchanges whole ranges"
    assert sliced.overlap == of_buckets(training, beside=1.0)


def test_the_rows_of_a_batch_on_other_ranks():
    """Of four ranks each has half of what all have: as the square root of the batch."""
    rows = Rows(3, (100, 100, 100, 100), (150, 150), 200)
    assert rows.on([0, 0, 0, 0]) == Rows(3, (100,) * 4, (200,), 200)
    assert rows.on(list(range(16))) == Rows(3, (50,) * 16, (50,) * 16, 200)
    assert rows.on([0], times=4) == Rows(3, (400,), (400,), 400)
    assert Rows(3, (100,), (100,), 100).on([0, 1]) == Rows(3, (100, 100), (100, 100), 100)


def config(apart, rows=100, **settings):
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 4, "context": 8, "vocab_size": 256}
    count = Layout(GPT2Config(**shape)).count
    used = {"of_ranks": [rows, rows], "of_nodes": [rows, rows], "any": rows, "apart": apart}
    return {"settings": shape | settings, "parameters": count, "looked_up": used}


def test_rows_of_a_run_are_apart_as_the_run_had_them():
    expected = Rows(4, (100, 100), (100, 100), 100)
    assert rows_of(config(True, overlap=True), SHARDED) == expected
    assert rows_of(config(False, overlap=True), SHARDED) is None, "the run exchanged the embedding as a whole"
    assert rows_of(config(False, overlap=True), STRATEGIES["sliced"]) == expected, "another strategy would not"
    assert rows_of(config(False, overlap=False), SHARDED) == expected, "with overlap it would not"
    assert rows_of(config(False, 129, overlap=False), SHARDED) is None, "too many to pay"
    assert rows_of(config(False, split_embedding="off"), SHARDED) is None
    assert rows_of({"settings": {}, "parameters": 5}, SHARDED) is None
