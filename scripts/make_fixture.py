"""Write the tests' fixtures, what PyTorch makes of a tiny GPT-2. This needs torch; the tests do not.

    python scripts/make_fixture.py [NAME ...]        tests/fixtures/NAME.npz, all of SHAPES by default

A file holds the starting parameters by name ("p/..."), 10 batches, and of the first batch the logits, the loss and
every gradient ("g/..."); then the losses and gradient norms of 10 AdamW steps with clipping, and the last parameters'
norm by name ("n/..."). T is above and not a multiple of the attention kernel's row block; V is not a multiple of 128.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from step_bench.torch_gpt2 import logits_of, loss_of, new_adamw, parameter_shapes

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
BATCH, STEPS = 2, 10
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-3, (0.9, 0.95), 1e-8, 0.1, 0.5


@dataclass(frozen=True)
class Shape:
    """bfloat16: the starting parameters are bfloat16 values, so that both storages start from the very same."""

    layers: int
    heads: int
    channels: int
    context: int
    vocabulary: int
    length: int
    bfloat16: bool = False


SHAPES = {
    "tiny_gpt2": Shape(layers=2, heads=2, channels=16, context=140, vocabulary=67, length=136),
    # Heads of 64 channels, as the CUDA kernels have them.
    "heads_of_64": Shape(layers=2, heads=1, channels=64, context=80, vocabulary=67, length=77, bfloat16=True),
}


def make_parameters(shape):
    """Random parameters, biases and LayerNorms included, large enough that every gradient matters."""
    generator = torch.Generator().manual_seed(1337)
    parameters = {}
    for name, size in parameter_shapes(shape.layers, shape.channels, shape.context, shape.vocabulary).items():
        value = 0.15 * torch.randn(size, generator=generator)
        if "ln" in name and name.endswith("weight"):
            value += 1.0
        if shape.bfloat16:
            value = value.bfloat16().float()
        parameters[name] = value.requires_grad_()
    return parameters


def main(name):
    shape = SHAPES[name]
    model = shape.layers, shape.heads
    p = make_parameters(shape)
    start = {f"p/{key}": value.detach().numpy().copy() for key, value in p.items()}
    size = STEPS, BATCH, shape.length + 1
    batches = torch.randint(shape.vocabulary, size, generator=torch.Generator().manual_seed(42))
    optimizer = new_adamw(p, WEIGHT_DECAY, lr=LR, betas=BETAS, eps=EPS)
    logits = logits_of(p, batches[0, :, :-1], *model).detach().numpy()
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        loss = loss_of(p, batch[:, :-1], batch[:, 1:], *model)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {f"g/{key}": value.grad.numpy().copy() for key, value in p.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(p.values(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    end = {f"n/{key}": np.float64(value.detach().double().norm()) for key, value in p.items()}
    numbers = np.array([*model, shape.channels, shape.context, shape.vocabulary])
    adamw = np.array([LR, *BETAS, EPS, WEIGHT_DECAY, CLIP])
    out = FIXTURES / f"{name}.npz"
    np.savez_compressed(
        out, **start, **gradients, **end, logits=logits, batches=batches.numpy().astype(np.uint8), losses=losses,
        norms=norms, shape=numbers, adamw=adamw, torch_version=torch.__version__,
    )  # fmt: skip
    print(f"{out}: loss {losses[0]:.6f} -> {losses[-1]:.6f} over {STEPS} steps, torch {torch.__version__}")


if __name__ == "__main__":
    for name in sys.argv[1:] or SHAPES:
        main(name)
