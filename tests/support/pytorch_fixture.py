"""A whole model against what PyTorch made of it (tests/fixtures/make_fixture.py), on any kernel set.

put(values): float32 host values as an array of the kernel set's; read(array): a host copy as floats.
"""

from pathlib import Path

import numpy as np
import pytest

from gpt2.config import GPT2Config
from gpt2.model import new_model
from gpt2.optimizer import AdamW, AdamWSettings, clip_scale
from gpt2.parameters import Layout, Parameters
from tests.support.logits import logits_of

FOLDER = Path(__file__).parents[1] / "fixtures"


class FixtureModel:
    """The fixture's model at its starting parameters, on one kernel set and dtype."""

    def __init__(self, name, kernels, dtype, put, read):
        self.data, self.read = np.load(FOLDER / f"{name}.npz"), read
        self.names = [key[2:] for key in self.data.files if key.startswith("p/")]
        config = GPT2Config(*(int(number) for number in self.data["shape"]))
        start = Parameters.zeros(Layout(config))
        for tensor in self.names:
            value = self.data[f"p/{tensor}"]
            start.view(tensor)[: len(value)] = value
        B, T = self.data["batches"].shape[1], self.data["batches"].shape[2] - 1
        self.model = new_model(config, kernels, B, T, dtype)
        self.model.parameters.flat[:] = put(start.flat)

    def batch(self, step):
        tokens = self.data["batches"][step].astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    def assert_logits(self, tolerance):
        """Of the largest value."""
        got, expected = self.read(logits_of(self.model, self.batch(0)[0])), self.data["logits"]
        assert np.abs(got - expected).max() / np.abs(expected).max() < tolerance

    def assert_gradients(self, loss_tolerance, tolerance):
        """The first batch's loss, and every gradient: of each one's norm. The key biases' is rounding noise."""
        tokens, targets = self.batch(0)
        loss = self.model.forward(tokens, targets, 1.0 / tokens.size) / tokens.size
        self.model.backward(accumulate=False)
        assert loss == pytest.approx(self.data["losses"][0], rel=loss_tolerance)
        C = self.model.config.n_embd
        for name in self.names:
            expected = self.data[f"g/{name}"]
            got = self.read(self.model.gradients.view(name))[: len(expected)]
            if name.endswith("qkv_bias"):
                got, expected = (np.delete(values, slice(C, 2 * C)) for values in (got, expected))
            assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < tolerance, name

    def assert_steps(self, count, loss_tolerance, norm_tolerance):
        """Losses and gradient norms of AdamW steps with clipping."""
        lr, beta1, beta2, eps, weight_decay, clip = self.data["adamw"].tolist()
        model = self.model
        layout, kernels = model.parameters.layout, model.kernels
        optimizer = AdamW(kernels, layout, 0, layout.size, AdamWSettings(beta1, beta2, eps, weight_decay))
        for step in range(count):
            tokens, targets = self.batch(step)
            loss = model.forward(tokens, targets, 1.0 / tokens.size) / tokens.size
            model.backward(accumulate=False)
            norm, scale = clip_scale(kernels.sum_of_squares(model.gradients.flat), clip)
            optimizer.update(model.parameters.flat, model.gradients.flat, lr, scale)
            assert loss == pytest.approx(self.data["losses"][step], rel=loss_tolerance), f"step {step}"
            assert norm == pytest.approx(self.data["norms"][step], rel=norm_tolerance), f"step {step}"
