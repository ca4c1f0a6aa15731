"""A step whose gradients stand out is skipped, on every rank alike; ranks that have drifted apart are named."""

import json
import re
import threading
import time
from collections import deque

import numpy as np
import pytest

from dist.ranges import cut
from dist.world import world_of
from gpt2.formats import checkpoint_files
from gpt2.model import GPT2
from gpt2.optimizer import AdamW, Clipping
from gpt2.parameters import Parameters, initialize
from scripts.training import between_steps
from scripts.training.worker import Worker
from strategies import STRATEGIES
from tests.ranks import test_strategies as small
from tests.ranks.test_resume import Runs
from tests.support.in_process import log
from tests.support.refusal import refusal_of_all

WINDOW, STEPS, SPIKE = 3, 6, 4  # the 5th batch is the bad one
DRIFT_STEP = 3


def test_a_norm_far_above_the_last_ones_is_skipped():
    random = np.random.default_rng(2)
    clipping, norms = Clipping(1.0, outlier_z=3.0, window=16), random.normal(5, 0.5, 60)
    norms[[8, 30, 31, 45]] = 60, 60, np.inf, np.nan
    taken = []  # what the window has seen
    for norm in norms:
        found, factor = clipping.scale(norm * norm)
        window = np.array(taken[-16:])
        skips = not np.isfinite(norm) or (len(window) == 16 and (norm - window.mean()) / window.std() > 3.0)
        assert (factor is None) == skips == clipping.skips
        assert skips or factor == pytest.approx(1 / norm)
        assert found == pytest.approx(norm, nan_ok=True)
        taken += [norm] if np.isfinite(norm) else []
    assert Clipping(0.0).scale(np.inf)[1] == 1.0, "without the option nothing is skipped"


def train(world, name, **options):
    """Parameters, and which steps were skipped, with one batch whose loss is scaled far up.

    Only rank 0 knows that under every strategy. Parameters of a rank that did not skip would differ.
    """
    strategy, parameters, gradients = small.new_strategy(world, name, outlier_z=3.0, **options)
    strategy.clipping.norms = deque(maxlen=WINDOW)
    share = slice(*cut(small.GLOBAL_BATCH, strategy.workers)[strategy.worker])
    model = GPT2(small.KERNELS, parameters, gradients, share.stop - share.start, small.LENGTH, strategy.before_use)
    skipped = []
    for step, batch in enumerate(small.BATCHES[:STEPS]):
        backward(model, batch[share], step, strategy.gradients_final)
        strategy.update(small.LR)
        skipped.append(strategy.clipping.skips)
    return small.whole(strategy, parameters)[: parameters.layout.count], world.comm.bcast(skipped)


def backward(model, sequences, step, gradients_final):
    scale = (1e4 if step == SPIKE else 1.0) / (small.GLOBAL_BATCH * small.LENGTH)
    model.forward(sequences[:, :-1], sequences[:, 1:], scale)
    model.backward(False, gradients_final)


def serial():
    """One rank that never sees the bad batch."""
    layout = small.Layout(small.CONFIG)
    parameters, gradients = Parameters.zeros(layout), Parameters.zeros(layout)
    initialize(parameters, seed=3)
    model = GPT2(small.KERNELS, parameters, gradients, small.GLOBAL_BATCH, small.LENGTH)
    optimizer = AdamW(small.KERNELS, layout, 0, layout.count, small.ADAMW)
    for step, batch in enumerate(small.BATCHES[:STEPS]):
        if step != SPIKE:
            small.gradients_of(model, batch)
            _, scale = small.clip_scale(small.KERNELS.sum_of_squares(gradients.flat), small.MAX_NORM)
            optimizer.update(parameters.flat, gradients.flat, small.LR, scale)
    return parameters.flat


@pytest.mark.ranks(3)
def test_every_strategy_skips_the_same_step(comm):
    world, expected = world_of(comm, comm.Split(comm.rank // 2, comm.rank)), serial()
    for name, kind in STRATEGIES.items():
        for options in [{}, {"bucket_bytes": 1000}] if kind.traits.overlaps else [{}]:
            if not (kind.traits.exchanges and kind.traits.same_weights):
                continue
            parameters, skipped = train(world, name, **options)
            assert skipped == [step == SPIKE for step in range(STEPS)], f"{name} {options}"
            np.testing.assert_allclose(parameters, expected, atol=1e-5, err_msg=f"{name} {options}")


@pytest.fixture
def runs(comm, shared_path):
    return None if comm is None else Runs(comm, shared_path)


def ends_with(runs, capsys, out, *flags) -> str:
    """The one line with which a run ends."""
    return refusal_of_all(runs.world.comm, capsys, runs.run, out, *flags)


def kept(runs, out) -> list[str]:
    """What a run leaves of checkpoints. A rank's thread may be about to remove one that has failed."""
    if checkpoints := runs.world.comm.rank == 0:
        for _ in range(1000):
            checkpoints = sorted(path.name for path in (runs.folder / out / "checkpoints").iterdir())
            if not any(name.endswith(".part") for name in checkpoints):
                break
            time.sleep(0.01)
    return runs.world.comm.bcast(checkpoints)


@pytest.mark.ranks(3)
def test_ranks_that_drift_apart_are_named(comm, runs, monkeypatch, capsys):
    """Before a checkpoint takes it in: that of step 3 is none of the steps that --check-replicas names."""
    check = between_steps.check_replicas

    def drift(world, model, *rest):
        if world.rank == 1 and rest[-1].number == DRIFT_STEP:
            model.parameters.flat[100] += 1e-6
        check(world, model, *rest)

    runs.run("healthy", "--check-replicas", 1, "--strategy", "zero-3")
    monkeypatch.setattr(between_steps, "check_replicas", drift)
    says = f"hold different parameters from the rest: rank 1 on {runs.world.host}: use --resume on other nodes"
    text = ends_with(runs, capsys, "between", "--check-replicas", 4, "--checkpoint-every", 2, "--strategy", "allreduce")
    assert text.startswith(f"error: after step 4 these {says}")
    assert kept(runs, "between") == ["step-00000002"]
    text = ends_with(runs, capsys, "saved", "--check-replicas", 99, "--strategy", "allreduce")
    assert text.startswith(f"error: after step 3 these {says}")
    assert kept(runs, "saved") == []
    text = ends_with(runs, capsys, "last", "--check-replicas", 99, "--checkpoint-every", 0, "--strategy", "allreduce")
    assert text.startswith(f"error: after step 6 these {says}")
    assert kept(runs, "last") == []


@pytest.mark.ranks(2)
def test_of_two_nobody_knows_which_is_right(comm, runs, monkeypatch, capsys):
    check = between_steps.check_replicas

    def drift(world, model, *rest):
        if world.rank == 0 and rest[-1].number == DRIFT_STEP:
            model.parameters.flat[100] += 1e-6
        check(world, model, *rest)

    monkeypatch.setattr(between_steps, "check_replicas", drift)
    text, host = ends_with(runs, capsys, "run", "--check-replicas", 3, "--strategy", "ring"), runs.world.host
    assert text.startswith(
        "error: after step 3 these hold different parameters, and nobody can tell which are right: "
        f"rank 0 on {host}; rank 1 on {host}: use --resume on other nodes"
    )


# --- what is not finite ---


def cases():
    for name, kind in STRATEGIES.items():
        yield [name] if kind.traits.exchanges else [name, "--no-exchange", "--checkpoint-every", 0]
        if kind.traits.overlaps:
            yield [name, "--overlap"]
    yield ["reduce-bcast", "--server", "dedicated"]
    yield ["sliced", "--grad-clip", 0]


def of_last_step(runs, out) -> dict:
    """The last line of a log, which has no NaN in it."""
    lines = (runs.folder / out / "log.jsonl").read_text().splitlines()
    assert len(lines) == 6
    return json.loads(lines[-1], parse_constant=pytest.fail)


@pytest.mark.ranks(3)
def test_an_infinite_gradient_in_the_last_step(comm, runs, monkeypatch, capsys):
    """Of one rank: its loss is good, and so are all parameters that are there."""
    gradients = Worker.forward_backward

    def overflow(worker, step, gradients_final):
        def spoilt(start, stop):
            if step == 6 and comm.rank == 1 and start == 0 < stop:
                worker.model.gradients.flat[start:stop][5] = np.inf
            gradients_final(start, stop)

        return gradients(worker, step, spoilt)

    monkeypatch.setattr(Worker, "forward_backward", overflow)
    for number, flags in enumerate(cases()):
        text = ends_with(runs, capsys, f"{number}", "--strategy", *flags, "--eval-every", 0)
        whose = rf" \(rank 1 on {runs.world.host}\)" if "none" in flags else ""
        says = rf"error: the gradients' norm of step 6 is (inf|nan){whose}: lower --lr"
        assert re.match(says, text), f"{flags}: {text}"
        assert kept(runs, f"{number}") == ([] if "none" in flags else ["step-00000003"])
        assert ("none" in flags) == (of_last_step(runs, f"{number}")["grad_norm"] is not None)


@pytest.mark.ranks(2)
def test_the_checkpoint_that_was_begun_before_is_completed(comm, runs, monkeypatch, capsys):
    """Its disk is so slow that the run has come to its end meanwhile."""
    gradients, write = Worker.forward_backward, checkpoint_files.write_part
    arrived = threading.Event()

    def overflow(worker, step, gradients_final):
        if step == 5:
            worker.model.parameters.flat[:] = np.inf
            arrived.set()
        return gradients(worker, step, gradients_final)

    def write_slowly(*part):
        arrived.wait()
        time.sleep(0.2)
        return write(*part)

    monkeypatch.setattr(Worker, "forward_backward", overflow)
    monkeypatch.setattr(checkpoint_files, "write_part", write_slowly)
    text = ends_with(runs, capsys, "run", "--strategy", "allreduce", "--eval-every", 0)
    assert text.startswith("error: the loss of step 5 is nan")
    assert kept(runs, "run") == ["step-00000003"]


@pytest.mark.ranks(2)
def test_an_update_whose_parameters_are_no_numbers(comm, runs, monkeypatch, capsys):
    """The last one: nothing is computed from it any more, and loss and norm are good."""
    update = AdamW.update

    def spoil(optimizer, parameters, *arguments):
        update(optimizer, parameters, *arguments)
        if optimizer.step == 6 and len(parameters):
            parameters[0] = np.nan

    monkeypatch.setattr(AdamW, "update", spoil)
    for number, flags in enumerate(cases()):
        text = ends_with(runs, capsys, f"{number}", "--strategy", *flags, "--eval-every", 0)
        assert re.match(r"error: after step 6 there is nan in (\w+_)?parameters of wte, expected", text), text
        assert kept(runs, f"{number}") == ([] if "none" in flags else ["step-00000003"]), flags
        assert of_last_step(runs, f"{number}")["loss"] > 0


@pytest.mark.ranks(2)
def test_what_rounding_took_from_infinite_gradients_is_forgotten(comm, runs, monkeypatch):
    """One step is skipped, and not all after it."""
    gradients = Worker.forward_backward

    def overflow(worker, step, gradients_final):
        loss = gradients(worker, step, gradients_final)
        if step == 2 and comm.rank == 1:
            worker.model.gradients.flat[:100] = np.inf
        return loss

    monkeypatch.setattr(Worker, "forward_backward", overflow)
    rounded = ["--wire", "bfloat16", "--error-feedback", "--skip-outliers", 6]
    for name in (name for name, kind in STRATEGIES.items() if kind.traits.error_feedback):
        runs.run(name, "--strategy", name, *rounded)
        assert ["skipped" in line for line in log(runs.folder / name)] == [step == 2 for step in range(1, 7)], name
    nodes = world_of(comm, comm.Split(comm.rank, comm.rank))
    runs.run("int8", "--strategy", "hierarchical", "--wire", "int8", "--skip-outliers", 6, world=nodes)
    assert ["skipped" in line for line in log(runs.folder / "int8")] == [step == 2 for step in range(1, 7)]
