"""Read and write the config.json of a GPT-2 of Hugging Face's transformers (their class GPT2Config)."""

import json
from pathlib import Path

from gpt2.config import GPT2_VOCABULARY, GPT2Config
from gpt2.errors import UserError, file_errors
from gpt2.files import regular

NUMBERS = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "n_positions": "context",
    "vocab_size": "vocab_size",
}
# Settings that change the computation: {name: the values that we support}. The first one is the default.
MEANINGS = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
LARGEST = 2**31 - 1
LONGEST_FILE = 1 << 24  # bytes


def read_config_file(path: Path) -> tuple[GPT2Config, bool]:
    """Return the model's shape, and whether its head is tied. UserError: missing, or another kind of model."""
    found = read_json(path, "the config.json of a GPT-2")
    if found.get("model_type") != "gpt2":
        raise UserError(
            f'{path}: describes a model of type {json.dumps(found.get("model_type"))[:80]}, expected "gpt2": '
            "give the folder of a GPT-2"
        )
    numbers = {ours: found.get(theirs) for theirs, ours in NUMBERS.items()}
    if any(type(number) is not int or not 1 <= number <= LARGEST for number in numbers.values()):
        raise _another(path, NUMBERS, found, "whole numbers of at least 1")
    if numbers["n_embd"] % numbers["n_head"]:
        raise _another(path, ("n_embd", "n_head"), found, "as many channels for each head")
    for name, values in (MEANINGS | {"n_inner": (None, 4 * numbers["n_embd"])}).items():
        if found.get(name, values[0]) not in values:
            raise _another(path, (name,), found, " or ".join(json.dumps(value) for value in values))
    return GPT2Config(**numbers), found.get("tie_word_embeddings", True) is True


def write_config_files(folder: Path, config: GPT2Config, stored: str) -> None:
    """Write config.json, from which transformers' GPT2LMHeadModel makes this model, and generation_config.json.

    Both name the tokens that begin and end a text: GPT-2's end-of-text, or null if the vocabulary is smaller.
    """
    end_of_text = GPT2_VOCABULARY - 1 if config.vocab_size >= GPT2_VOCABULARY else None
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    described = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for theirs, ours in NUMBERS.items()},
        **{name: values[0] for name, values in MEANINGS.items()},
        "n_inner": None,
        "tie_word_embeddings": True,
        # We train without dropout; the default of transformers is 0.1.
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        **ends,
        "torch_dtype": stored,
    }
    write_json(folder / "config.json", described)
    write_json(folder / "generation_config.json", ends | {"pad_token_id": end_of_text})


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, expected: str) -> dict:
    """Read the object in a JSON file. UserError: missing, too long, not JSON, not an object."""
    advice = f"expected {expected}; check the path and its permissions"
    with file_errors(path, advice), open(path, "rb", opener=regular) as file:
        content = file.read(LONGEST_FILE + 1)
    try:
        if len(content) > LONGEST_FILE:
            raise ValueError(f"longer than {LONGEST_FILE} bytes")
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError(f"but a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise UserError(f"{path}: not a JSON object ({why}), expected {expected}: copy it again") from None
    return found


def _another(path: Path, names, found: dict, expected: str) -> UserError:
    said = ", ".join(f"{name} {json.dumps(found.get(name))[:80]}" for name in names)
    return UserError(f"{path}: says {said}, expected {expected}: use another GPT-2")
