"""A step whose gradients stand out is skipped, on every rank alike; ranks that have drifted apart are named."""

from collections import deque

import numpy as np
import pytest

from dist.ranges import cut
from dist.world import world_of
from gpt2.model import GPT2
from gpt2.optimizer import AdamW, Clipping
from gpt2.parameters import Parameters, initialize
from strategies import STRATEGIES
from tests.ranks import test_strategies as small
from tests.ranks.test_resume import Runs

WINDOW, STEPS, SPIKE = 3, 6, 4  # the 5th batch is the bad one


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
        for options in [{}, {"bucket_bytes": 1000}] if kind.overlaps else [{}]:
            if not kind.exchanges:
                continue
            parameters, skipped = train(world, name, **options)
            assert skipped == [step == SPIKE for step in range(STEPS)], f"{name} {options}"
            np.testing.assert_allclose(parameters, expected, atol=1e-5, err_msg=f"{name} {options}")


@pytest.mark.ranks(3)
def test_ranks_that_drift_apart_are_named(comm, shared_path, monkeypatch, capsys):
    from scripts.training.between_steps import ReplicaCheck

    runs, check = Runs(comm, shared_path), ReplicaCheck.after

    def drift(self, step):
        if self.world.rank == 1 and step == 3:
            self.model.parameters.flat[100] += 1e-6
        check(self, step)

    runs.run("healthy", "--check-replicas", 1, "--strategy", "zero-3")
    monkeypatch.setattr(ReplicaCheck, "after", drift)
    with pytest.raises(SystemExit) as ended:
        runs.run("drifting", "--check-replicas", 2, "--strategy", "allreduce")
    assert ended.value.code == 2
    text = capsys.readouterr().err
    says = f"error: after step 4 these hold other parameters than the rest: rank 1 on {runs.world.host}: "
    assert comm.rank or text.startswith(says)


def test_who_is_apart():
    from scripts.training.between_steps import apart

    assert apart([5, 5, 5]) == []
    assert apart([5, 6, 5, 7]) == [1, 3]
    assert apart([6, 5]) == [1]
