"""What a user sets reaches what it is for: runs of scripts/train.py, against training written out here."""

import json
import math
import shutil
import time

import numpy as np
import pytest

from dist.host import operation
from dist.world import start_world, world_of
from gpt2.config import GPT2Config
from gpt2.data.shards import write_shard
from gpt2.formats import weights
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.parameters import Layout, Parameters, initialize
from scripts.training import assemble, plan
from tests.support.in_process import alone, log, train

CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=8, context=8, vocab_size=50)
SIZES = ["--n-layer", 1, "--n-head", 1, "--n-embd", 8, "--context", 8, "--vocab-size", 50]
PLAIN = ["--no-shuffle", "--eval-every", 0, "--trace", "off"]
LENGTH, SEED = 8, 11
TOKENS = np.random.default_rng(1).integers(50, size=20_001).astype(np.uint16)

# Each differs from its default, and from all others.
SET = {
    "steps": 6, "batch_size": 3, "grad_accum": 2, "lr": 0.03, "min_lr": 0.01, "warmup": 2, "schedule": "linear",
    "beta1": 0.6, "beta2": 0.7, "eps": 1e-3, "weight_decay": 0.5, "grad_clip": 0.4, "seed": SEED,
}  # fmt: skip


def flags_of(settings):
    return [text for name, value in settings.items() for text in ("--" + name.replace("_", "-"), value)]


@pytest.fixture
def data(comm, shared_path):
    if comm is None:
        return None
    if comm.rank == 0:
        write_shard(shared_path / "tokens.bin", TOKENS)
    comm.Barrier()
    return ["--train-data", shared_path / "tokens.bin", *SIZES, *PLAIN]


def gradient(layout, parameters, step, batch):
    """Loss and gradients (float64) of a step's windows, taken in the order of the file."""
    gradients, first = Parameters.zeros(layout), (step - 1) * batch
    tokens = np.stack([TOKENS[LENGTH * i : LENGTH * (i + 1) + 1] for i in range(first, first + batch)]).astype(np.int32)
    model = GPT2(load_kernels("numpy", 1), parameters, gradients, batch, LENGTH)
    scale = 1 / (batch * LENGTH)
    loss = model.forward(tokens[:, :-1], tokens[:, 1:], scale) * scale
    model.backward(False)
    return loss, gradients.flat.astype(float)


def by_hand(settings):
    """(losses, norms, parameters) of a training with AdamW in its authors' form."""
    s, layout = settings, Layout(CONFIG)
    parameters, m, v = Parameters.zeros(layout), 0.0, 0.0
    initialize(parameters, s["seed"])
    decays = np.zeros(layout.size)
    for tensor in layout.tensors:
        decays[tensor.start : tensor.stop] = len(tensor.shape) == 2
    losses, norms = [], []
    for step in range(1, s["steps"] + 1):
        loss, g = gradient(layout, parameters, step, s["batch_size"] * s["grad_accum"])
        losses.append(loss)
        norms.append(math.sqrt(float(g @ g)))
        g *= min(1.0, s["grad_clip"] / norms[-1])
        m, v = s["beta1"] * m + (1 - s["beta1"]) * g, s["beta2"] * v + (1 - s["beta2"]) * g * g
        unit = m / (1 - s["beta1"] ** step) / (np.sqrt(v / (1 - s["beta2"] ** step)) + s["eps"])
        left = 1 - (step - s["warmup"]) / (s["steps"] - s["warmup"])
        lr = s["lr"] * step / s["warmup"] if left > 1 else s["min_lr"] + left * (s["lr"] - s["min_lr"])
        parameters.flat[:] -= lr * (unit + s["weight_decay"] * decays * parameters.flat)
    return losses, norms, parameters.flat


@pytest.mark.ranks(1)
def test_a_run_is_the_training_that_its_flags_say(comm, shared_path, data):
    for number, change in enumerate([{}, {"grad_clip": 1e6, "beta1": 0.2, "weight_decay": 0.0}]):
        settings, run = SET | change, shared_path / f"{number}"
        train(alone(), run, *data, *flags_of(settings))
        losses, norms, parameters = by_hand(settings)
        np.testing.assert_allclose([line["loss"] for line in log(run)], losses, rtol=1e-5)
        np.testing.assert_allclose([line["grad_norm"] for line in log(run)], norms, rtol=1e-4)
        assert min(norms) > SET["grad_clip"], "clipping must have been at work"
        np.testing.assert_allclose(weights.load(run).flat, parameters, atol=1e-5)


@pytest.mark.ranks(1)
def test_milestones_and_the_jobs_limit_reach_what_they_are_for(comm, shared_path, data, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(round(time.time()) - 1800))  # over since half an hour
    flags = ["--steps", 7, "--checkpoint-every", 1, "--keep", 1, "--keep-every", 3, "--log-every", 1]
    train(alone(), shared_path / "run", *data, *flags)
    kept = sorted(path.name for path in (shared_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{step:08}" for step in (3, 6, 7)]
    printed = capsys.readouterr().out
    assert "0:00 left, ends 30 min after the job's limit" in printed
    # A start without --keep-every keeps the milestones of an earlier one, also the last, which was a newest one.
    flags = ["--steps", 10, "--lr-steps", 7, "--checkpoint-every", 1, "--keep", 1, "--resume"]
    train(alone(), shared_path / "run", *data, *flags)
    kept = sorted(path.name for path in (shared_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{step:08}" for step in (3, 6, 10)]


@pytest.mark.ranks(1)
def test_the_seed_decides_the_order_of_the_windows(comm, shared_path, data):
    """From the same parameters, which stay: losses tell which windows a step has."""
    flags = [*data, "--steps", 3, "--lr", 0]
    train(alone(), shared_path / "start", *flags)
    losses = {}
    for name, more in {"1": ["--shuffle", "--seed", 1], "2": ["--shuffle", "--seed", 2], "none": ["--seed", 1]}.items():
        for again in "ab":
            run = shared_path / (name + again)
            train(alone(), run, *flags, *more, "--init", shared_path / "start")
            losses[name + again] = [line["loss"] for line in log(run)]
    assert all(losses[name + "a"] == losses[name + "b"] for name in ("1", "2", "none"))
    assert len({tuple(found) for found in losses.values()}) == 3
    np.testing.assert_allclose(losses["nonea"], [line["loss"] for line in log(shared_path / "start")], rtol=1e-5)


# Betas near 1: then it shows after 140 steps, too, how many of them were updates.
OUTLIERS = {
    **SET, "steps": 150, "batch_size": 1, "grad_accum": 1, "schedule": "constant", "lr": 1e-4, "min_lr": 1e-5,
    "warmup": 0, "beta1": 0.99, "beta2": 0.999,
}  # fmt: skip
WINDOW, Z = 128, 0.8  # so low that some steps are skipped


def skipped_by_the_rule(norms):
    result = []
    for step, norm in enumerate(norms):
        past = np.array(norms[max(0, step - WINDOW) : step])
        result.append(bool(len(past) == WINDOW and norm > past.mean() + Z * past.std()))
    return result


@pytest.mark.ranks(1)
def test_outliers_are_skipped_by_the_z_that_was_asked_for_also_after_a_resume(comm, shared_path, data):
    """And skipped steps are no updates: a run taken up after some has the same bits as one that was not interrupted."""
    whole, resumed, without = (shared_path / name for name in ("whole", "resumed", "without"))
    flags = [*data, *flags_of(OUTLIERS), "--checkpoint-every", 140]
    train(alone(), whole, *flags, "--skip-outliers", Z)
    lines = log(whole)
    skipped = [line.get("skipped", False) for line in lines]
    assert skipped == skipped_by_the_rule([line["grad_norm"] for line in lines])
    assert sum(skipped[:140]) >= 1
    assert 1 <= sum(skipped[140:]) < 10
    marker = json.loads((whole / "checkpoints" / "step-00000140" / "checkpoint.json").read_text())
    assert marker["updates"] == 140 - sum(skipped[:140])

    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000150")
    train(alone(), resumed, *flags, "--skip-outliers", Z, "--resume")
    again = log(resumed)
    assert [line.get("skipped", False) for line in again] == skipped
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    np.testing.assert_array_equal(weights.load(resumed).flat, weights.load(whole).flat)

    train(alone(), without, *flags)
    assert not any(line.get("skipped") for line in log(without))


@pytest.mark.ranks(1)
def test_how_often_lines_are_printed_and_what_traces_may_take(comm, shared_path, data, monkeypatch, capsys):
    """A run whose traces are full says so at its end, and another one does not."""
    flags, asked, make = [*data, "--steps", 9, "--trace", "on"], [], assemble.Tracer
    monkeypatch.setattr("traces.record.recorder.WRITE_AT_STEP_END_NS", 0)
    for name, most_bytes in (("whole", 10**6), ("full", 100)):

        def noted(*arguments, most_bytes, least=most_bytes, **options):
            asked.append(most_bytes)
            return make(*arguments, most_bytes=least, **options)

        monkeypatch.setattr(assemble, "Tracer", noted)
        train(alone(), shared_path / name, *flags, "--log-every", 4, "--trace-mb", 3)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines if line.startswith("step ") and "loss" in line] == [
            "1/9", "4/9", "8/9", "9/9",
        ]  # fmt: skip
        endings = [line for line in lines if line.startswith("the traces end before the run, as they are as large as")]
        assert len(endings) == (name == "full")
    assert asked == [3e6, 3e6]


class Counted:
    """In the place of a communicator's Isend: the bytes of each message."""

    def __init__(self, monkeypatch):
        from dist.host import exchange

        self.sizes, make = [], exchange.RingExchange.__init__

        def counting(ring, comm, *arguments, **options):
            make(ring, comm, *arguments, **options)
            ring._comm = CountedComm(ring._comm, self.sizes)

        monkeypatch.setattr(exchange.RingExchange, "__init__", counting)


class CountedComm:
    def __init__(self, comm, sizes):
        self._comm, self._sizes = comm, sizes

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, buffer, *where):
        self._sizes.append(buffer.nbytes)
        return self._comm.Isend(buffer, *where)


def link(both, latency_s=1e-6):
    return {"node": 0, "host": "a", "latency_s": latency_s, "out": both, "in": both, "both": both}


@pytest.mark.ranks(2)
def test_links_and_wire_decide_what_a_message_holds(comm, shared_path, data, monkeypatch):
    """Half a millisecond of the slowest link, at least 60,000 bytes: a vector of 360 KB around a ring of two."""
    world = world_of(comm, comm.Split(comm.rank, comm.rank))
    flags = [*data, "--n-embd", 32, "--vocab-size", 2600, "--steps", 1, "--strategy", "ring"]
    messages = {}
    for name, rate, more in (
        ("fast", 1e12, []), ("middle", 0.2e9, []), ("slow", 1e6, []), ("half", 1e12, ["--wire", "bfloat16"]),
    ):  # fmt: skip
        monkeypatch.setattr(plan, "probe_links", lambda world, rate=rate: [link(1e12), link(rate)])
        with monkeypatch.context() as patch:
            counted = Counted(patch)
            train(world, shared_path / name, *flags, *more)
        messages[name] = counted.sizes
    half = sum(messages["fast"]) // 2
    assert len(messages["fast"]) == 2, "a chunk is one message each way round"
    assert abs(sum(messages["half"]) - half) <= 16
    for name, most in (("middle", 100_000), ("slow", 60_000)):
        assert sum(messages[name]) == 2 * half
        assert len(messages[name]) == 2 * math.ceil(half / most)
        assert max(messages[name]) <= most


@pytest.mark.ranks(2)
def test_op_and_wire_decide_what_adds(comm, shared_path, data, monkeypatch):
    made = []

    class Noted(operation.OwnSum):
        def __init__(self, bfloat16):
            made.append(bfloat16)
            super().__init__(bfloat16)

    monkeypatch.setattr(operation, "OwnSum", Noted)
    for name, flags, expected, op in (
        ("default", ["--strategy", "reduce-scatter"], [], "mpi"), ("own", ["--op", "own"], [False], "own"),
        ("half", ["--wire", "bfloat16", "--strategy", "sliced"], [True], "own"),
        ("ring", ["--strategy", "ring", "--wire", "bfloat16"], [], None),  # which compiles nothing for it
    ):  # fmt: skip
        made.clear()
        train(world_of(comm, comm.Split(0, comm.rank)), shared_path / name, *data, "--steps", 1, *flags)
        assert made == expected
        assert json.loads((shared_path / name / "config.json").read_text())["settings"]["op"] == op


@pytest.mark.ranks(2)
def test_a_run_that_goes_on_keeps_its_buckets(comm, shared_path, data, monkeypatch):
    """Others would add the gradients in another order: the links are measured anew at each start.

    A slow answer wants large buckets: all of the vector is one; a quick one leaves several.
    """
    world = world_of(comm, comm.Split(comm.rank, comm.rank))
    flags = [*data, "--n-layer", 6, "--n-embd", 64, "--lr-steps", 3, "--strategy", "ring", "--overlap"]
    counts = []
    for steps, latency_s, more in ((1, 1e-6, []), (2, 0.1, ["--resume"]), (1, 0.1, [])):
        monkeypatch.setattr(plan, "probe_links", lambda world, s=latency_s: [link(1e12), link(1e9, s)])
        with monkeypatch.context() as patch:
            counted = Counted(patch)
            train(world, shared_path / ("run" if steps == 2 or not counts else "anew"), *flags, "--steps", steps, *more)
        counts.append(len(counted.sizes))
    assert counts[0] == counts[1] > counts[2]


@pytest.mark.ranks(2)
def test_error_feedback_is_kept_by_whom_it_was_asked_for(comm, shared_path, data, capsys):
    """The errors lie in the checkpoint of the run that feeds them back; they are its own, not another strategy's."""
    flags = [*data, "--wire", "bfloat16", "--checkpoint-every", 1]
    for name, more in (("fed", ["--error-feedback"]), ("not", [])):
        train(start_world(), shared_path / name, *flags, "--steps", 2, "--strategy", "ring", *more)
    held = {name: list((shared_path / name).glob("checkpoints/*/rank-0000*.safetensors")) for name in ("fed", "not")}
    assert all(b'"errors_' in path.read_bytes() for path in held["fed"])
    assert not any(b'"errors_' in path.read_bytes() for path in held["not"])
    for strategy, begins_anew in (("ring", False), ("tree", True)):
        capsys.readouterr()
        if comm.rank == 0:
            shutil.copytree(shared_path / "fed", shared_path / strategy)
        comm.Barrier()
        more = ["--error-feedback", "--steps", 3, "--strategy", strategy, "--resume"]
        train(start_world(), shared_path / strategy, *flags, *more)
        assert comm.rank or ("error feedback begins anew" in capsys.readouterr().out) == begins_anew
