"""Write tests/fixtures/tiny_gpt2.npz, what PyTorch makes of a tiny GPT-2. Only this script needs torch; tests do not.

    python scripts/make_fixture.py [OUT]

The file holds the starting parameters by name ("p/..."), 10 batches, and of the first batch the logits, the loss and
every gradient ("g/..."); then the losses and gradient norms of 10 AdamW steps with clipping, and the last parameters'
norm by name ("n/..."). T is above and not a multiple of the attention kernel's row block; V is not a multiple of 128.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F

LAYERS, HEADS, CHANNELS, CONTEXT, VOCABULARY = 2, 2, 16, 140, 67
BATCH, LENGTH, STEPS = 2, 136, 10
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-3, (0.9, 0.95), 1e-8, 0.1, 0.5


def make_parameters():
    """Random parameters by our names, biases and LayerNorms included, large enough that every gradient matters."""
    C = CHANNELS
    shapes = {"wte": (VOCABULARY, C), "wpe": (CONTEXT, C)}
    for i in range(LAYERS):
        for name, shape in {
            "ln1_weight": (C,), "ln1_bias": (C,), "qkv_weight": (3 * C, C), "qkv_bias": (3 * C,),
            "attproj_weight": (C, C), "attproj_bias": (C,), "ln2_weight": (C,), "ln2_bias": (C,),
            "fc_weight": (4 * C, C), "fc_bias": (4 * C,), "fcproj_weight": (C, 4 * C), "fcproj_bias": (C,),
        }.items():  # fmt: skip
            shapes[f"layer.{i}.{name}"] = shape
    shapes |= {"lnf_weight": (C,), "lnf_bias": (C,)}
    generator = torch.Generator().manual_seed(1337)
    parameters = {}
    for name, shape in shapes.items():
        value = 0.15 * torch.randn(shape, generator=generator)
        if "ln" in name and name.endswith("weight"):
            value += 1.0
        parameters[name] = value.requires_grad_()
    return parameters


def logits_of(p, tokens):
    """GPT-2 in PyTorch's own functions."""
    B, T = tokens.shape
    x = p["wte"][tokens] + p["wpe"][:T]
    for i in range(LAYERS):
        w = {name.split(".")[2]: value for name, value in p.items() if name.startswith(f"layer.{i}.")}
        h = F.layer_norm(x, (CHANNELS,), w["ln1_weight"], w["ln1_bias"])
        q, k, v = F.linear(h, w["qkv_weight"], w["qkv_bias"]).split(CHANNELS, dim=2)
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, CHANNELS)
        x = x + F.linear(attention, w["attproj_weight"], w["attproj_bias"])
        h = F.layer_norm(x, (CHANNELS,), w["ln2_weight"], w["ln2_bias"])
        h = F.gelu(F.linear(h, w["fc_weight"], w["fc_bias"]), approximate="tanh")
        x = x + F.linear(h, w["fcproj_weight"], w["fcproj_bias"])
    return F.layer_norm(x, (CHANNELS,), p["lnf_weight"], p["lnf_bias"]) @ p["wte"].T


def main(out):
    p = make_parameters()
    start = {f"p/{name}": value.detach().numpy().copy() for name, value in p.items()}
    batches = torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(42))
    groups = [
        {"params": [v for v in p.values() if v.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [v for v in p.values() if v.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms, first = [], [], {}
    for step, batch in enumerate(batches):
        logits = logits_of(p, batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {"logits": logits.detach().numpy()} | {f"g/{n}": v.grad.numpy().copy() for n, v in p.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(p.values(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    end = {f"n/{name}": np.float64(value.detach().double().norm()) for name, value in p.items()}
    shape = np.array([LAYERS, HEADS, CHANNELS, CONTEXT, VOCABULARY])
    adamw = np.array([LR, *BETAS, EPS, WEIGHT_DECAY, CLIP])
    np.savez_compressed(
        out, **start, **first, **end, batches=batches.numpy().astype(np.uint8), losses=losses, norms=norms,
        shape=shape, adamw=adamw, torch_version=torch.__version__,
    )  # fmt: skip
    print(f"{out}: loss {losses[0]:.6f} -> {losses[-1]:.6f} over {STEPS} steps, torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tests/fixtures/tiny_gpt2.npz")
