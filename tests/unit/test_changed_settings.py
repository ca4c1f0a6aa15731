"""A run that goes on with other settings: what would bend its curve unasked is refused, what was meant is said."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2.errors import UserError
from gpt2.optimizer import LearningRateSchedule
from scripts.settings.checks import complete
from scripts.settings.derived import lasting, learning_rate, resolved
from scripts.settings.training import parse_settings
from scripts.training.changes import changed_settings

pytestmark = pytest.mark.any_mpi
RANKS = 2
FIRST = "--steps 1000 --warmup 10"


def completed(flags: str):
    return complete(parse_settings("", flags.split()), RANKS)[0]


def go_on(flags: str, step=1000, first=FIRST) -> str:
    """Return what is said when a run of `first` goes on after that step with these flags."""
    facts = {"settings": json.loads(json.dumps(lasting(completed(first), RANKS)))}
    checkpoint = SimpleNamespace(path=Path("run") / "checkpoints" / f"step-{step:08}", step=step, facts=facts)
    s = completed(flags)
    return changed_settings(checkpoint, lasting(s, RANKS), s.typed, s.steps)


def refusal(*arguments, **options) -> str:
    with pytest.raises(UserError) as raised:
        go_on(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_longer_run_does_not_raise_the_rate_unasked():
    line = refusal("--steps 2000 --warmup 10")
    rate = LearningRateSchedule("cosine", 1e-3, 1e-4, 10, 2000).at(1001)
    assert line.startswith("run/checkpoints/step-00001000: made with --lr-steps 1000, this run has --lr-steps 2000")
    assert f"the learning rate of step 1001 is {rate:.3g}, before 0.0001" in line
    assert line.endswith("add --lr-steps 1000 to continue as before, or --lr-steps 2000 if you intend the change")
    # Both ways that it offers are taken.
    assert go_on("--steps 2000 --warmup 10 --lr-steps 1000") == ""
    said = go_on("--steps 2000 --warmup 10 --lr-steps 2000")
    assert said.startswith("changed: lr-steps 2000 (before 1000); the learning rate of step 1001 is 0.00055")
    assert said.endswith(", before 0.0001")


@pytest.mark.parametrize("flags", [FIRST, "--steps 1000 --warmup 10 --lr-steps 1000", "--steps 500 --warmup 10"])
def test_a_command_that_makes_no_step_more_changes_nothing(flags):
    assert go_on(flags) == ""


def test_a_run_that_was_stopped_early_goes_on_with_its_plan():
    plan = "--steps 100 --lr-steps 1000 --warmup 10"
    assert go_on("--steps 1000 --warmup 10", 100, plan) == ""
    assert go_on("--steps 200 --lr-steps 1000 --warmup 10", 100, plan) == ""
    assert "--lr-steps 1000 to continue as before" in refusal("--steps 200 --warmup 10", 100, plan)


def test_what_is_left_out_is_asked_for():
    """As with --lr, without which the default comes back. All that the run had is named, to be typed as it stands."""
    first = "--steps 1000 --warmup 10 --lr 6e-4 --min-lr 0 --weight-decay 0.2 --schedule linear"
    line = refusal(FIRST, 500, first)
    before = "--schedule linear --lr 0.0006 --min-lr 0.0 --weight-decay 0.2"
    own = "--schedule cosine --lr 0.001 --min-lr 0.0001 --weight-decay 0.1"
    assert f"made with {before}, this run has {own}" in line
    assert f"add {before} to continue as before, or {own} if" in line
    assert go_on(f"{FIRST} {before}", 500, first) == ""
    assert go_on(f"{FIRST} {own}", 500, first).startswith("changed: schedule cosine (before linear), lr 0.001 (before ")


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--lr 1e-4", "lr 0.0001 (before 0.001); the learning rate of step 501 is"),
        ("--weight-decay 0", "weight-decay 0.0 (before 0.1)"),
        ("--skip-outliers 6", "skip-outliers 6.0 (before 0.0)"),
        ("--grad-clip 0.5 --beta2 0.99 --eps 1e-6 --beta1 0.8", "beta1 0.8 (before 0.9), beta2 0.99 (before "),
    ],
)
def test_what_is_typed_is_meant(flag, says):
    """A diverging run is told to lower --lr and to go on: that needs no second flag."""
    assert go_on(f"{FIRST} {flag}", 500).startswith(f"changed: {says}")
    assert "this run has --" in refusal(FIRST, 500, f"{FIRST} {flag}")


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--wire bfloat16 --strategy ring", "wire bfloat16 (before float32)"),
        ("--wire bfloat16 --strategy ring --error-feedback", "error-feedback True (before False)"),
        ("--dtype bfloat16", "dtype bfloat16 (before float32)"),
        ("--batch-size 2 --grad-accum 2", "validation-windows 80 (before 160)"),
        ("--eval-steps 0", "validation-windows 0 (before 160)"),
    ],
)
def test_other_roundings_and_validations_are_said(flag, says):
    """They are the machine's as much as the user's: a run may move to one where they cannot be as they were."""
    assert says in go_on(f"{FIRST} {flag}", 500)
    assert go_on(FIRST, 500, f"{FIRST} {flag}").startswith("changed: ")
    assert go_on(f"{FIRST} {flag} --eval-every 0", 500, f"{FIRST} {flag}") == ""


def test_where_the_rate_does_not_jump_a_longer_schedule_is_said():
    """In the warm-up, and before the last fifth of wsd: there a run is made longer without harm."""
    said = go_on("--steps 2000 --warmup 10", 5)
    assert said == "changed: lr-steps 2000 (before 1000); the learning rate of step 6 is 0.0006, before 0.0006"
    assert go_on("--steps 2000 --schedule wsd", 799, "--steps 1000 --schedule wsd").startswith("changed: lr-steps 2000")
    assert "--lr-steps 1000 to continue" in refusal("--steps 2000 --schedule wsd", 801, "--steps 1000 --schedule wsd")


def test_a_floor_of_its_own_is_not_lost_with_another_rate():
    line = refusal(f"{FIRST} --lr 1e-4", 500, f"{FIRST} --min-lr 0")
    assert "made with --lr 0.001 --min-lr 0.0, this run has --lr 0.0001 --min-lr 1e-05" in line
    assert go_on(f"{FIRST} --lr 1e-4 --min-lr 0", 500, f"{FIRST} --min-lr 0").startswith("changed: lr 0.0001 (before")


def test_schedules_that_come_to_the_same_are_the_same():
    assert go_on("--steps 2000 --schedule constant", 1000, "--steps 1000 --schedule constant") == ""
    assert "lr-steps" not in go_on("--steps 2000 --schedule constant --lr 1e-4", 1000, "--steps 1000")
    assert go_on("--steps 3", 2, "--steps 2") == ""  # of a warm-up of 20
    assert go_on("--steps 20", 2, "--steps 2") == ""
    assert go_on("--steps 22", 2, "--steps 2") != ""


def test_a_checkpoint_that_lacks_a_setting_is_refused():
    """As one of a release that had no such flag."""
    own = lasting(completed(FIRST), RANKS)
    facts = {"settings": {name: value for name, value in own.items() if name != "beta2"}}
    checkpoint = SimpleNamespace(path=Path("step-00000500"), step=500, facts=facts)
    with pytest.raises(UserError, match=r"^step-00000500: its settings lack beta2, expected [^\n]*$"):
        changed_settings(checkpoint, own, frozenset(), 1000)


# The settings themselves


def test_what_was_typed():
    assert parse_settings("", ["--lr", "0.001", "--no-shuffle", "--resume"]).typed == {"lr", "shuffle", "resume"}
    assert parse_settings("", []).typed == frozenset()
    given = parse_settings("", ["--preset", "nanogpt-shakespeare", "--lr", "0.5"])
    assert (given.typed, given.lr, given.warmup, given.steps) == ({"preset", "lr"}, 0.5, 100, 2000)


def test_the_schedule_ends_where_the_run_does_unless_it_is_told():
    assert learning_rate(completed("--steps 50")) == LearningRateSchedule("cosine", 1e-3, 1e-4, 20, 50)
    assert learning_rate(completed("--steps 50 --lr-steps 80 --lr 2")) == LearningRateSchedule("cosine", 2, 0.2, 20, 80)
    with pytest.raises(UserError, match="--lr-steps is 0, expected a number of at least 1"):
        completed("--lr-steps 0")


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ("", ("baby", 4, 4, 128, 64, 256)),
        ("--model tiny --n-layer 3 --context 32", ("tiny", 3, 4, 64, 32, 256)),
        ("--model gpt2-124M --tokenizer gpt2", ("gpt2-124M", 12, 12, 768, 1024, 50257)),
    ],
)
def test_every_default_is_in_the_settings_that_are_kept(flags, shape):
    s, config = complete(parse_settings("", flags.split()), RANKS)
    used = resolved(s, config, 3, Path("runs/a"))
    assert tuple(used[name] for name in ("model", "n_layer", "n_head", "n_embd", "context", "vocab_size")) == shape
    assert (used["threads"], used["out"], used["seq_len"], used["lr_steps"]) == (3, "runs/a", shape[4], 200)
    assert "typed" not in used
    decides_nothing = {
        "preset", "train_data", "val_data", "text", "global_batch_size", "peak_tflops", "log_every", "expect_ranks",
        "pipeline_layers", "tokens", "launcher", "supervisor",
    }  # fmt: skip
    decided_later = {"op", "overlap"}  # with the strategy and the transport
    assert {name for name, value in used.items() if value is None} == decides_nothing | decided_later
