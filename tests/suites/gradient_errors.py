"""How far --dtype bfloat16 moves each tensor's gradient from float32's, beside what PyTorch's autocast does to it.

    python tests/suites/gradient_errors.py --model gpt2-124M --batch-size 2 --seq-len 64

Needs PyTorch. Batches of random tokens, each with parameters of its own, the same on both sides. The error is relative
to the norm of the tensor's float32 gradient: the root of the mean square over the batches, as one batch's error of one
tensor varies by some percent. The exit code is 1 if an error of ours is above --limit and above PyTorch's.
"""

import argparse

import numpy as np

from gpt2.config import PRESETS
from gpt2.kernels import load_kernels
from gpt2.model import new_model
from gpt2.parameters import initialize


def main():
    settings = parse()
    draws = [errors_of(settings, seed) for seed in range(settings.seed, settings.seed + settings.batches)]
    squares = np.mean([[np.square(pair) for pair in draw.values()] for draw in draws], axis=0)
    print(f"{'relative error of':28} {'ours':>9} {'autocast':>9} {'ratio':>6}")
    for name, (own, other) in zip(draws[0], np.sqrt(squares), strict=True):
        print(f"{name:28} {own:9.2e} {other:9.2e} {own / other:6.2f}{'   <--' if own > other else ''}")
    own, other = np.sqrt(squares).T
    print(
        f"{len(own)} tensors, {len(draws)} batches from seed {settings.seed}: ours at most {own.max():.1e}, autocast's "
        f"{other.max():.1e}; ours is larger in {sum(own > other)}, by at most {(own / other).max():.2f} x, geometric "
        f"mean of all {np.exp(np.log(own / other).mean()):.2f} x"
    )
    raise SystemExit(bool((own > np.maximum(other, settings.limit)).any()))


def errors_of(settings, seed: int) -> dict[str, tuple[float, float]]:
    """By tensor, of one batch: how far ours is from our float32, and PyTorch's from its own."""
    config, shape = PRESETS[settings.model], (2, settings.batch_size, settings.seq_len)
    inputs, targets = np.random.default_rng(seed).integers(config.vocab_size, size=shape, dtype=np.int32)
    exact, parameters = ours(config, "float32", inputs, targets, seed)
    rounded, _ = ours(config, "bfloat16", inputs, targets, seed)
    torch_exact, torch_rounded = (autograd(config, parameters, is_on, inputs, targets) for is_on in (False, True))
    apart = max(error(exact[name], torch_exact[name]) for name in exact)
    assert apart < 1e-4, f"float32 here and there differ by {apart:.1e}"
    return {name: (error(rounded[name], exact[name]), error(torch_rounded[name], torch_exact[name])) for name in exact}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="baby", help="shape by name (baby)")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences (2)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens of a sequence (64)")
    parser.add_argument("--batches", type=int, default=1, help="batches, each with other parameters (1)")
    parser.add_argument("--seed", type=int, default=1, help="of the first (1)")
    parser.add_argument("--limit", type=float, default=0.01, help="an error that needs no comparison (0.01)")
    return parser.parse_args()


def ours(config, dtype: str, inputs, targets, seed: int) -> tuple[dict, dict]:
    """Gradients and parameters by tensor."""
    model = new_model(config, load_kernels("numpy", 2, dtype=dtype), *inputs.shape)
    initialize(model.parameters, seed)
    model.forward(inputs, targets, 1.0 / inputs.size)
    model.backward(accumulate=False)
    return by_name(model.gradients), by_name(model.parameters)


def by_name(vector) -> dict:
    return {t.name: vector.flat[t.start : t.stop].reshape(t.shape) for t in vector.layout.tensors}


def autograd(config, parameters: dict, is_rounded: bool, inputs, targets) -> dict:
    """PyTorch's gradients at these parameters, in float32 or as autocast rounds."""
    import torch  # here, so that --help needs none

    from scripts.step_bench.torch_gpt2 import loss_of

    p = {name: torch.tensor(value).requires_grad_() for name, value in parameters.items()}
    p["wte"].data = p["wte"].data[: config.vocab_size]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_rounded):
        loss = loss_of(p, *(torch.tensor(tokens).long() for tokens in (inputs, targets)), config.n_layer, config.n_head)
    loss.backward()
    return {name: value.grad.numpy() for name, value in p.items()}


def error(found, expected) -> float:
    """Of the rows that both have: PyTorch's embedding has no pad rows."""
    rows = min(len(found), len(expected))
    difference = found[:rows].astype(np.float64) - expected[:rows]
    return float(np.linalg.norm(difference) / np.linalg.norm(expected[:rows]))


if __name__ == "__main__":
    main()
