"""What comes between steps: when, what a validation makes of its sums, and the log that a resumed run goes on with."""

import json
from types import SimpleNamespace

import pytest

from scripts.training import between_steps
from scripts.training.between_steps import Validation, is_time
from scripts.training.folder import RunFolder
from traces import Tracer


def test_every_so_many_steps():
    assert [step for step in range(1, 10) if is_time(step, 3)] == [3, 6, 9]
    assert not any(is_time(step, 0) for step in range(1, 10))


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 10]), (5, [5, 10]), (0, [])])
def test_a_validation_is_a_mean_and_the_last_step_has_one(every, steps, monkeypatch):
    monkeypatch.setattr(between_steps, "sum_everywhere", lambda comm, *part: [2 * number for number in part])
    worker = SimpleNamespace(validation_loss=lambda batches: (30.0, 10))
    validation = Validation(None, Tracer(), worker, every, last_step=10, batches=1)
    found = {step: validation.after(step) for step in range(1, 11)}
    assert {step: one for step, one in found.items() if one} == {step: {"val_loss": 3.0} for step in steps}


def test_a_run_that_is_taken_up_forgets_what_came_after(tmp_path):
    """Lines of later steps, one that a crash has cut, and what is none."""
    log = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 2)]
    log.write_text("".join(lines) + "no line\n" + '{"step": 1}')
    RunFolder(tmp_path, resumed_step=2)
    assert log.read_text() == lines[0] + lines[1] + lines[3]
