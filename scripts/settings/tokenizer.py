"""Which tokenizer belongs to a model: that of the run that trained it, or the one with a vocabulary of its size."""

import json
from pathlib import Path

import tiktoken

from gpt2.config import GPT2_VOCABULARY
from gpt2.data.tokenizers import TOKENIZERS, load_tokenizer
from gpt2.errors import UserError
from gpt2.files import read_bytes
from gpt2.formats.huggingface_tokenizer import find_other

OF_VOCABULARY = {GPT2_VOCABULARY: "gpt2", 256: "bytes"}


def choose_tokenizer(asked: str | None, path: Path | None, vocab_size: int) -> tiktoken.Encoding:
    """The tokenizer `asked` for; else that of the run which holds `path`; else GPT-2's for 50257 tokens, bytes for 256.

    UserError: neither says which, or it has more tokens than the model, or it cannot be loaded, or in the folder lies
    another one: many a GPT-2 of another language has 50257 tokens, too.
    """
    said = asked or (path and tokenizer_of_run(path))
    name = said or OF_VOCABULARY.get(vocab_size)
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
    folder = path and (path.parent if path.suffix == ".safetensors" else path)
    if not said and folder and (other := find_other(folder, encoding)):
        raise UserError(f"{other}: not of the {name} tokenizer, expected that one's or none: say --tokenizer")
    return encoding


def tokenizer_of_run(path: Path) -> str | None:
    """The name that config.json gives, for a path of a run folder, a checkpoint in it, or a checkpoint's file.

    None: the path is in no run folder, or the run was trained on token shards and knows no tokenizer. UserError: the
    name is none of a tokenizer.
    """
    path = Path(path).absolute()
    run = next((folder.parent for folder in path.parents if folder.name == "checkpoints"), path)
    try:
        name = json.loads(read_bytes(run / "config.json"))["settings"]["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # the path is in no run folder, or the run was trained on token shards and knows no tokenizer
    if name is not None and name not in list(TOKENIZERS):
        found = f"{name!r}"[:50]
        raise UserError(
            f"{run / 'config.json'}: its tokenizer is {found}, expected {' or '.join(TOKENIZERS)}: say --tokenizer"
        )
    return name
