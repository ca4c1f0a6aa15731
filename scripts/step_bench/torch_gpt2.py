"""GPT-2 in PyTorch, for bench_step.py and bench_training.py. It also made the tests' fixture."""

import torch
import torch.nn.functional as F


def logits_of(p: dict, tokens, layers: int, heads: int, pads=None):
    """Return logits (B, T, V) of tokens (B, T). p: parameters by our names (gpt2/parameters.py), wte padded or not.

    pads: (V,) from pads_of, added to the logits so that the softmax excludes pad rows.
    """
    C = p["wte"].shape[1]
    x = F.embedding(tokens, p["wte"]) + p["wpe"][: tokens.shape[1]]
    for i in range(layers):
        w = {name.split(".")[2]: value for name, value in p.items() if name.startswith(f"layer.{i}.")}
        x = block_of(w, x, heads)
    return F.linear(F.layer_norm(x, (C,), p["lnf_weight"], p["lnf_bias"]), p["wte"], pads)


def block_of(w: dict, x, heads: int):
    """Return the output (B, T, C) of one layer for x (B, T, C). w: the layer's parameters by name."""
    B, T, C = x.shape
    h = F.layer_norm(x, (C,), w["ln1_weight"], w["ln1_bias"])
    q, k, v = F.linear(h, w["qkv_weight"], w["qkv_bias"]).split(C, dim=2)
    q, k, v = (t.view(B, T, heads, -1).transpose(1, 2) for t in (q, k, v))
    attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
    x = x + F.linear(attention, w["attproj_weight"], w["attproj_bias"])
    h = F.layer_norm(x, (C,), w["ln2_weight"], w["ln2_bias"])
    h = F.gelu(F.linear(h, w["fc_weight"], w["fc_bias"]), approximate="tanh")
    return x + F.linear(h, w["fcproj_weight"], w["fcproj_bias"])


def pads_of(vocab_size: int, rows: int, device):
    """Return (rows,): 0 for each token, minus infinity for each pad row of the embedding."""
    return torch.zeros(rows, device=device).masked_fill(torch.arange(rows, device=device) >= vocab_size, -torch.inf)


def loss_of(p: dict, tokens, targets, layers: int, heads: int, pads=None):
    """Return the mean cross-entropy of tokens (B, T) against targets (B, T). pads: as in logits_of."""
    logits = logits_of(p, tokens, layers, heads, pads)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def new_adamw(p: dict, weight_decay: float, **options) -> torch.optim.AdamW:
    """Return an AdamW that decays matrices and embeddings only."""
    return torch.optim.AdamW(decay_groups(p, weight_decay), **options)


def decay_groups(p: dict, weight_decay: float) -> list[dict]:
    """Group the parameters for an optimizer: matrices and embeddings decay, all others do not."""
    return [
        {"params": [value for value in p.values() if value.dim() > 1], "weight_decay": weight_decay},
        {"params": [value for value in p.values() if value.dim() == 1], "weight_decay": 0.0},
    ]
