"""Which tokenizer a model speaks: the one its run was trained with, or the one that its vocabulary tells."""

import json
from pathlib import Path

import tiktoken

from gpt2.config import GPT2_VOCABULARY
from gpt2.data.tokenizers import load_tokenizer
from gpt2.errors import UserError

OF_VOCABULARY = {GPT2_VOCABULARY: "gpt2", 256: "bytes"}


def choose_tokenizer(asked: str | None, path: Path | None, vocab_size: int) -> tiktoken.Encoding:
    """`asked`; else what the run that holds `path` was trained with; else GPT-2's for 50257 tokens, bytes for 256.

    UserError: none of them says it, it has more tokens than the model, or it cannot be loaded.
    """
    name = asked or (path and tokenizer_of_run(path)) or OF_VOCABULARY.get(vocab_size)
    if name is None:
        raise UserError(
            f"a model of {vocab_size} tokens, expected {' or '.join(map(str, OF_VOCABULARY))} to tell its tokenizer: "
            "say --tokenizer gpt2 or bytes"
        )
    encoding = load_tokenizer(name)
    if encoding.n_vocab > vocab_size:
        raise UserError(
            f"the {name} tokenizer has {encoding.n_vocab} tokens, expected at most the model's {vocab_size}: "
            "choose the model's own, see --tokenizer"
        )
    return encoding


def tokenizer_of_run(path: Path) -> str | None:
    """What config.json says, of a run folder or of the one that a checkpoint or a file in it belongs to."""
    path = Path(path).absolute()
    run = next((folder.parent for folder in path.parents if folder.name == "checkpoints"), path)
    try:
        return json.loads((run / "config.json").read_text())["settings"]["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no run's, or one that only knew tokens
