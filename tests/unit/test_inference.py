"""What a model's losses are made into: which rows come first, right endings, perplexity."""

import math

import numpy as np
import pytest

from gpt2.inference.evaluation import Scorer, perplexity
from gpt2.inference.evaluation_choices import Example, count_correct
from gpt2.inference.generated_text import Sampling


def test_the_longest_rows_come_first():
    """So that too little memory shows at once; the answers come in the rows' order."""

    class Noting(Scorer):
        def _batch(self, rows):
            lengths.append([len(row) for row in rows])
            return [np.full(len(row) - 1, float(len(row))) for row in rows]

    lengths = []
    found = Noting(None, None, batch_size=2).losses([np.zeros(n, int) for n in (3, 9, 5, 7)])
    assert lengths == [[9, 7], [5, 3]]
    assert [row[0] for row in found] == [3, 9, 5, 7]


class Told:
    """A scorer that is told the losses; `rows`: what it was asked."""

    def __init__(self, losses):
        self.answers = [np.array(row, float) for row in losses]

    def losses(self, rows):
        assert [len(row) - 1 for row in rows] == list(map(len, self.answers))
        return self.answers


def example(label, *endings):
    return Example(0, label, np.array([1, 2, 3]), [np.array(ending) for ending in endings])


def test_an_ending_is_right_by_its_own_losses():
    """The context's, before them, do not count: two of three tokens. An ending's first counts."""
    scorer = Told([[90, 90, 1, 1], [0, 0, 2, 2]])
    assert count_correct(scorer, [example(0, [4, 5], [6, 7])]) == (1, 1)
    scorer = Told([[0, 0, 9, 1], [0, 0, 2, 2]])
    assert count_correct(scorer, [example(1, [4, 5], [6, 7])]) == (1, 1)


def test_normalization_takes_the_mean_loss_of_a_token():
    """The short ending is the more probable one, the long one has the likelier tokens."""
    losses = [[0, 0, 3], [0, 0, 2, 2, 2]]
    endings = [4], [5, 6, 7]
    assert count_correct(Told(losses), [example(0, *endings)]) == (1, 0)
    assert count_correct(Told(losses), [example(1, *endings)]) == (0, 1)


def test_perplexity():
    assert perplexity(0.0) == 1.0
    assert perplexity(10.0) == pytest.approx(22026.4657948)
    assert perplexity(1e4) == math.inf


def test_the_nucleus_is_as_small_as_it_can_be():
    """Of two tokens with half of the probability each, one has top_p = 0.5 already."""
    assert Sampling(1.0, 0, 0.5).probabilities(np.zeros(2)).tolist() == [1, 0]
    assert Sampling(1.0, 0, 0.51).probabilities(np.zeros(2)).tolist() == [0.5, 0.5]
