"""Every strategy leaves every rank with the same bits, and those of one serial rank on the same global batch."""

import numpy as np
import pytest

from dist.ranges import cut
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.optimizer import AdamW, AdamWSettings, clip_scale
from gpt2.parameters import Layout, Parameters, initialize
from strategies import STRATEGIES, Job, check_strategy, worker_count
from traces import Tracer

CONFIG = GPT2Config(
    n_layer=1, n_head=1, n_embd=5, context=8, vocab_size=11
)  # 1055 parameters: 2, 3, 4 do not divide it
STEPS, GLOBAL_BATCH, LENGTH, LR, MAX_NORM = 20, 12, 8, 1e-2, 0.3
BATCHES = np.random.default_rng(5).integers(CONFIG.vocab_size, size=(STEPS, GLOBAL_BATCH, LENGTH + 1)).astype(np.int32)
KERNELS = load_kernels("numpy", 1)
# With this eps, rounding noise where the true gradient is 0 (the key bias) stays noise: it is not normalized to steps.
ADAMW = AdamWSettings(eps=1e-4)


def new_buffers(multiple_of):
    layout = Layout(CONFIG, multiple_of)
    parameters, gradients = Parameters.zeros(layout), Parameters.zeros(layout)
    initialize(parameters, seed=3)
    return layout, parameters, gradients


def gradients_of(model, sequences):
    """Loss and gradients of some sequences of the global batch, scaled as part of it."""
    scale = 1.0 / (GLOBAL_BATCH * LENGTH)
    loss = model.forward(sequences[:, :-1], sequences[:, 1:], scale) * scale
    model.backward(False)
    return loss


def serial():
    """Parameters (count,), losses and norms of one rank that takes the whole global batch."""
    layout, parameters, gradients = new_buffers(1)
    model = GPT2(KERNELS, parameters, gradients, GLOBAL_BATCH, LENGTH)
    optimizer = AdamW(KERNELS, layout, 0, layout.count, ADAMW)
    losses, norms = [], []
    for batch in BATCHES:
        losses.append(gradients_of(model, batch))
        norm, scale = clip_scale(KERNELS.sum_of_squares(gradients.flat), MAX_NORM)
        norms.append(norm)
        optimizer.update(parameters.flat, gradients.flat, LR, scale)
    return parameters.flat, losses, norms


def distributed(comm, name, server):
    """The same over the ranks of comm, by a strategy; the gradient buffer starts full of junk."""
    layout, parameters, gradients = new_buffers(comm.size)
    gradients.flat[: layout.count] = 1e6
    job = Job(
        comm=comm, parameters=parameters.flat, gradients=gradients.flat,
        new_optimizer=lambda start, stop: AdamW(KERNELS, layout, start, stop, ADAMW),
        sum_of_squares=KERNELS.sum_of_squares, max_norm=MAX_NORM, tracer=Tracer(), server=server,
    )  # fmt: skip
    strategy = STRATEGIES[name](job)
    assert strategy.workers == worker_count(server, comm.size)
    if strategy.worker is not None:
        share = slice(*cut(GLOBAL_BATCH, strategy.workers)[strategy.worker])
        model = GPT2(KERNELS, parameters, gradients, share.stop - share.start, LENGTH)
    losses, norms = [], []
    for batch in BATCHES:
        loss = gradients_of(model, batch[share]) if strategy.worker is not None else 0.0
        norms.append(strategy.update(LR))
        losses.append(comm.allreduce(loss))
    assert not parameters.flat[layout.count :].any(), "the pad must stay zero"
    return parameters.flat[: layout.count], losses, norms


def cases(ranks):
    for name in STRATEGIES:
        if name != "none":
            yield name, "colocated"
    if ranks > 1:
        yield "reduce-bcast", "dedicated"


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_strategy_is_one_serial_rank(comm):
    reference, reference_losses, reference_norms = serial()
    assert max(reference_norms) > MAX_NORM, "clipping must have been at work"
    assert comm.size == 1 or len(reference) % comm.size, "the parameter count must not divide"
    for name, server in cases(comm.size):
        parameters, losses, norms = distributed(comm, name, server)
        others = comm.allgather(parameters.tobytes())
        assert others.count(others[0]) == comm.size, f"{name} {server}: parameters differ between ranks"
        error = np.abs(parameters - reference).max() / np.abs(reference).max()
        assert error < 1e-5, f"{name} {server}: relative error {error}"
        np.testing.assert_allclose(losses, reference_losses, rtol=1e-5, err_msg=name)
        if comm.rank == 0:
            np.testing.assert_allclose(norms, reference_norms, rtol=1e-4, err_msg=name)
        again, _, _ = distributed(comm, name, server)
        assert again.tobytes() == parameters.tobytes(), f"{name} {server}: a second run gives other bits"


@pytest.mark.ranks(3)
def test_none_exchanges_nothing(comm):
    """Each rank goes its own way."""
    parameters, _, _ = distributed(comm, "none", "colocated")
    assert len(set(comm.allgather(parameters.tobytes()))) == comm.size


@pytest.mark.ranks(3)
def test_optimizer_state_is_sharded(comm):
    """In sliced and reduce-scatter a rank keeps state for what it updates; the server alone in reduce-bcast."""
    held = {}
    for name in ("reduce-bcast", "sliced", "reduce-scatter", "allreduce"):
        asked = []
        flat = np.zeros(1056, np.float32)
        job = Job(comm, flat, flat.copy(), lambda a, b, asked=asked: asked.append((a, b)), None, 1.0, None, "colocated")
        STRATEGIES[name](job)
        held[name] = comm.allgather(asked)
    thirds = [[(0, 352)], [(352, 704)], [(704, 1056)]]
    assert held["sliced"] == held["reduce-scatter"] == thirds
    assert held["reduce-bcast"] == [[(0, 1056)], [], []]
    assert held["allreduce"] == [[(0, 1056)]] * 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sliced", "dedicated", 3, False), "has no server"),
        (("reduce-bcast", "dedicated", 1, False), "at least 2"),
        (("none", "colocated", 2, False), "--no-exchange"),
        (("sliced", "colocated", 2, True), "--no-exchange"),
    ],
)
def test_what_a_strategy_cannot_do(arguments, says):
    with pytest.raises(UserError, match=says):
        check_strategy(*arguments)
