"""Find the tokenizer of a model, for all programs."""

import json
from itertools import islice
from pathlib import Path

import tiktoken

from gpt2.data.shards import shard_paths
from gpt2.data.tokenizers import TOKENIZERS, VOCABULARY_SIZES, load_tokenizer
from gpt2.errors import UserError
from gpt2.files import read_bytes
from gpt2.formats.checkpoints import newest_first
from gpt2.formats.huggingface_tokenizer import OTHER, tokenizer_of_folder

NAMES = " or ".join(TOKENIZERS)
OF_VOCABULARY = {size: name for name, size in VOCABULARY_SIZES.items()}


def choose_tokenizer(requested: str | None, path: Path | None, vocab_size: int) -> tiktoken.Encoding:
    """Load the tokenizer that tokenizer_name finds. Raise UserError also if it is too large or lacks files."""
    name = tokenizer_name(requested, path, vocab_size)
    check_fits(name, vocab_size)
    return load_tokenizer(name)


def tokenizer_name(requested: str | None, path: Path | None, vocab_size: int) -> str:
    """Return the requested tokenizer, else that of the model at `path`, else the tokenizer with `vocab_size` tokens.

    Raise UserError if none of these is known.
    """
    name = requested or (path and tokenizer_of(path)) or OF_VOCABULARY.get(vocab_size)
    if name is None:
        sizes = " or ".join(map(str, OF_VOCABULARY))
        raise UserError(
            f"a model of {vocab_size} tokens, expected {sizes} to tell its tokenizer: add --tokenizer {NAMES}"
        )
    if name == OTHER:
        raise UserError(
            f"{path or 'the model'}: its tokenizer is unknown, expected {NAMES}: tokenize with the model's own, "
            "or add --tokenizer"
        )
    return name


def check_fits(name: str, vocab_size: int) -> None:
    """Raise UserError if a tokenizer has more tokens than the model."""
    if VOCABULARY_SIZES[name] > vocab_size:
        raise UserError(
            f"the {name} tokenizer has {VOCABULARY_SIZES[name]} tokens, expected at most the model's {vocab_size}: "
            "choose the model's own, see --tokenizer"
        )


def tokenizer_of(path: Path) -> str | None:
    """Return the tokenizer that a run or a Hugging Face folder names: one of TOKENIZERS, OTHER, or None without a name.

    path: as for --init. Raise UserError if the file that names the tokenizer is damaged.
    """
    path = Path(path)
    found = tokenizer_of_run(path.absolute()) or tokenizer_of_run(path.resolve())  # a link may lead out of the run
    return found or tokenizer_of_folder(path.parent if path.suffix == ".safetensors" else path)


def tokenizer_of_run(path: Path) -> str | None:
    """Read the name from config.json. path: a run folder, a checkpoint in it, or a checkpoint's file.

    Return None outside a run folder or without a name. Raise UserError if config.json names an unknown tokenizer.
    """
    of_checkpoint = (folder.parent for folder in path.parents if folder.name == "checkpoints")
    for run in (path, *islice(of_checkpoint, 1)):  # the run itself may lie in a folder named checkpoints
        try:
            name = json.loads(read_bytes(run / "config.json"))["settings"]["tokenizer"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if name is not None and name not in [*TOKENIZERS, OTHER]:
            found = f"{name!r}"[:50]
            raise UserError(f"{run / 'config.json'}: its tokenizer is {found}, expected {NAMES}: add --tokenizer")
        return name
    return None


def tokenizer_of_training(settings, vocab_size: int) -> str | None:
    """Return the tokenizer of a training run: of its text, or of the tokens in --train-data if known.

    For a new model, the default is bytes. Raise UserError like choose_tokenizer, or if the tokens are of another one.
    """
    goes_on, model = start_of(settings)
    said = settings.tokenizer or (model and tokenizer_of(model))
    if settings.tokenizer and (settings.train_data or (model and not goes_on)):
        check_fits(settings.tokenizer, vocab_size)  # with --text, a new model may be smaller: its tokens are checked
    if not settings.train_data:
        return tokenizer_name(said or (None if model else "bytes"), model, vocab_size)
    if model and not goes_on:
        said = said or OF_VOCABULARY.get(vocab_size)
    for pattern in filter(None, (settings.train_data, settings.val_data)):
        said = said or tokenizer_of_shards(pattern)
        check_tokens(pattern, tokenizer_of_shards(pattern), said)
    return said


def start_of(settings) -> tuple[bool, Path | None]:
    """Return whether --resume continues a run, and the path of the model to start from (None: a new model)."""
    if settings.resume and newest_first(Path(settings.out) / "checkpoints"):
        return True, Path(settings.out)
    return False, None if settings.init == "random" else Path(settings.init)


def tokenizer_of_shards(pattern: str) -> str | None:
    """Read the tokenizer from the manifest that prepare.py writes beside shards; None without a manifest."""
    for path in shard_paths(pattern)[:1]:
        try:
            name = json.loads(read_bytes(path.parent / "manifest.json"))["tokenizer"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return name if name in list(TOKENIZERS) else None
    return None


def check_tokens(what, found: str | None, expected: str | None) -> None:
    """Raise UserError if tokens were made by another tokenizer than the model's. what: their name in the message."""
    if found and expected and found != expected:
        raise UserError(
            f"{what}: tokens made with tokenizer {found}, expected the model's, {expected}: tokenize the text with "
            f"that one, or add --tokenizer {found} if the model was trained on these"
        )
