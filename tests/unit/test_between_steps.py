"""What comes between steps: when, what a validation makes of its sums, and which lines of a log are whole."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from scripts.training import between_steps, folder
from scripts.training.between_steps import MadeStep, is_time, validate
from traces import Tracer


def test_every_so_many_steps():
    assert [step for step in range(1, 10) if is_time(step, 3)] == [3, 6, 9]
    assert not any(is_time(step, 0) for step in range(1, 10))


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 10]), (5, [5, 10]), (0, [])])
def test_a_validation_is_a_mean_and_the_last_step_has_one(every, steps, monkeypatch):
    monkeypatch.setattr(between_steps, "sum_everywhere", lambda comm, *part: [2 * number for number in part])
    worker = SimpleNamespace(validation_loss=lambda *batches: (30.0, 10))
    made = [MadeStep(number, None, {}) for number in range(1, 11)]
    for step in made:
        validate(None, Tracer(), worker, every, 10, 1, nullcontext, step)
    assert {step.number: step.record for step in made if step.record} == {step: {"val_loss": 3.0} for step in steps}


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (b'{"step": 7, "loss": 1.0}\n', 7),
        (b'{"step": 7, "loss": 1.0}', math.inf),  # a crash has cut it
        (b'{"step": 7, "lo\n', math.inf),
        (b'{"loss": 1.0}\n', math.inf),
        (b'{"step": "7"}\n', math.inf),
    ],
)
def test_a_line_that_is_not_whole_is_of_no_step(line, step):
    """So that a run that is taken up drops it, as it drops later steps."""
    assert folder._step_of(line) == step
