"""Write the tests' GPT-2 folder, as transformers saves one. This needs torch and transformers; the tests do not.

    python scripts/make_huggingface_fixture.py       tests/fixtures/huggingface_gpt2/

In two files with an index, and expected.npz: a batch, its logits (B, T, V) and its mean loss. The biases and LayerNorms
are random, too: a new model's are 0 and 1, and would hide one that is taken for another.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent.parent / "tests" / "fixtures" / "huggingface_gpt2"
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 24, "vocab_size": 67}


def random_model(shape: dict, seed: int, **options) -> transformers.GPT2LMHeadModel:
    """A GPT-2 in evaluation, float32, all its parameters random."""
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **ends, **options)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(0.15 * torch.randn(value.shape, generator=generator) + ("ln_" in name and "weight" in name))
    return model


def expected(model, tokens: torch.Tensor) -> tuple[np.ndarray, float]:
    """Logits (B, T, V) of tokens[:, :-1], and the mean loss against tokens[:, 1:]."""
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return logits.numpy(), loss.item()


def main():
    model = random_model(SHAPE, seed=1337)
    tokens = torch.randint(SHAPE["vocab_size"], (2, 21), generator=torch.Generator().manual_seed(42))
    shutil.rmtree(FOLDER, ignore_errors=True)
    model.save_pretrained(FOLDER, max_shard_size="20KB")
    (FOLDER / "generation_config.json").unlink()
    logits, loss = expected(model, tokens)
    np.savez_compressed(FOLDER / "expected.npz", tokens=tokens.numpy().astype(np.uint8), logits=logits, loss=loss)
    print(f"{FOLDER}: loss {loss:.6f}, transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
