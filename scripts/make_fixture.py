"""Write tests/fixtures/tiny_gpt2.npz, what PyTorch makes of a tiny GPT-2. This needs torch; the tests do not.

    python scripts/make_fixture.py [OUT]

The file holds the starting parameters by name ("p/..."), 10 batches, and of the first batch the logits, the loss and
every gradient ("g/..."); then the losses and gradient norms of 10 AdamW steps with clipping, and the last parameters'
norm by name ("n/..."). T is above and not a multiple of the attention kernel's row block; V is not a multiple of 128.
"""

import sys

import numpy as np
import torch
from torch_gpt2 import logits_of, loss_of, new_adamw, parameter_shapes

LAYERS, HEADS, CHANNELS, CONTEXT, VOCABULARY = 2, 2, 16, 140, 67
BATCH, LENGTH, STEPS = 2, 136, 10
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-3, (0.9, 0.95), 1e-8, 0.1, 0.5


def make_parameters():
    """Random parameters, biases and LayerNorms included, large enough that every gradient matters."""
    generator = torch.Generator().manual_seed(1337)
    parameters = {}
    for name, shape in parameter_shapes(LAYERS, CHANNELS, CONTEXT, VOCABULARY).items():
        value = 0.15 * torch.randn(shape, generator=generator)
        if "ln" in name and name.endswith("weight"):
            value += 1.0
        parameters[name] = value.requires_grad_()
    return parameters


def main(out):
    p = make_parameters()
    start = {f"p/{name}": value.detach().numpy().copy() for name, value in p.items()}
    batches = torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(42))
    optimizer = new_adamw(p, WEIGHT_DECAY, lr=LR, betas=BETAS, eps=EPS)
    logits = logits_of(p, batches[0, :, :-1], LAYERS, HEADS).detach().numpy()
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        loss = loss_of(p, batch[:, :-1], batch[:, 1:], LAYERS, HEADS)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {f"g/{name}": value.grad.numpy().copy() for name, value in p.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(p.values(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    end = {f"n/{name}": np.float64(value.detach().double().norm()) for name, value in p.items()}
    shape = np.array([LAYERS, HEADS, CHANNELS, CONTEXT, VOCABULARY])
    adamw = np.array([LR, *BETAS, EPS, WEIGHT_DECAY, CLIP])
    np.savez_compressed(
        out, **start, **gradients, **end, logits=logits, batches=batches.numpy().astype(np.uint8), losses=losses,
        norms=norms, shape=shape, adamw=adamw, torch_version=torch.__version__,
    )  # fmt: skip
    print(f"{out}: loss {losses[0]:.6f} -> {losses[-1]:.6f} over {STEPS} steps, torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tests/fixtures/tiny_gpt2.npz")
