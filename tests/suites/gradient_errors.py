"""How far --dtype bfloat16 moves each tensor's gradient from float32's, beside what PyTorch's autocast does to it.

    python tests/suites/gradient_errors.py --model gpt2-124M --batch-size 2 --seq-len 64

Needs PyTorch. One batch of random tokens, the same parameters on both sides. The error is relative to the norm of the
tensor's float32 gradient. The exit code is 1 if an error of ours is above --limit and above PyTorch's.
"""

import argparse

import numpy as np

from gpt2.config import PRESETS
from gpt2.kernels import load_kernels
from gpt2.model import new_model
from gpt2.parameters import initialize


def main():
    settings = parse()
    config, shape = PRESETS[settings.model], (2, settings.batch_size, settings.seq_len)
    inputs, targets = np.random.default_rng(1).integers(config.vocab_size, size=shape, dtype=np.int32)
    exact, parameters = ours(config, "float32", inputs, targets)
    rounded, _ = ours(config, "bfloat16", inputs, targets)
    torch_exact, torch_rounded = (autograd(config, parameters, is_on, inputs, targets) for is_on in (False, True))
    print(f"{'relative error of':28} {'ours':>9} {'autocast':>9} {'ratio':>6}")
    errors = {}
    for name in exact:
        own, other = errors[name] = error(rounded[name], exact[name]), error(torch_rounded[name], torch_exact[name])
        print(f"{name:28} {own:9.2e} {other:9.2e} {own / other:6.2f}{'   <--' if own > other else ''}")
    own, other = np.transpose(list(errors.values()))
    print(
        f"{len(own)} tensors: ours at most {own.max():.1e}, autocast's {other.max():.1e}; ours is larger in "
        f"{sum(own > other)}, by at most {(own / other).max():.2f} x, geometric mean of all "
        f"{np.exp(np.log(own / other).mean()):.2f} x"
    )
    print(f"float32 here and there differ by at most {max(error(exact[n], torch_exact[n]) for n in exact):.1e}")
    raise SystemExit(bool((own > np.maximum(other, settings.limit)).any()))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="baby", help="shape by name (baby)")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences (2)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens of a sequence (64)")
    parser.add_argument("--limit", type=float, default=0.01, help="an error that needs no comparison (0.01)")
    return parser.parse_args()


def ours(config, dtype: str, inputs, targets) -> tuple[dict, dict]:
    """Gradients and parameters by tensor."""
    model = new_model(config, load_kernels("numpy", 2, dtype=dtype), *inputs.shape)
    initialize(model.parameters, seed=1)
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
