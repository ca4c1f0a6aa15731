"""Tokenizers by name, as tiktoken Encodings: "gpt2" (50257 tokens) and "bytes" (256, no files needed)."""

import os
from pathlib import Path
from threading import Thread

import tiktoken

from gpt2.config import GPT2_VOCABULARY
from gpt2.errors import UserError
from gpt2.files import temporary_files

DOWNLOAD_LIMIT_S = 60.0
END_OF_TEXT = "<|endoftext|>"  # GPT-2's name of the token that separates documents

# Names of GPT-2's files in tiktoken's cache folder: the SHA-1 of each download address.
GPT2_FILES = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Return a tokenizer by name; `.n_vocab` is its vocabulary size.

    UserError: unknown name, or GPT-2's files are neither cached nor downloaded within a minute.
    """
    if name not in TOKENIZERS:
        raise UserError(f"tokenizer {name!r} is unknown, expected one of {', '.join(TOKENIZERS)}: change --tokenizer")
    return TOKENIZERS[name]()


def byte_encoding() -> tiktoken.Encoding:
    """Return the tokenizer whose tokens are the bytes of the UTF-8 text."""
    return tiktoken.Encoding(
        name="bytes",
        pat_str=r"(?s:.)",  # one character at a time, as nothing is merged
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={},
        explicit_n_vocab=256,
    )


def gpt2_encoding(limit_s: float = DOWNLOAD_LIMIT_S) -> tiktoken.Encoding:
    """Return GPT-2's tokenizer (Radford et al. 2019), from tiktoken's cache folder, downloading it if missing."""
    outcome = {}

    def load():
        try:
            outcome["encoding"] = tiktoken.get_encoding("gpt2")
        except Exception as error:  # no network, proxy, damaged file, full disk
            outcome["error"] = error

    # tiktoken downloads without a time limit, and hangs for minutes behind a firewall that drops packets.
    thread = Thread(target=load, daemon=True)
    thread.start()
    thread.join(limit_s)
    if "encoding" not in outcome:
        error = outcome.get("error")
        reason = type(error).__name__ if error else f"no answer in {limit_s:g} s"
        raise UserError(missing_files_message(reason)) from error
    return outcome["encoding"]


def missing_files_message(reason: str) -> str:
    folder = cache_folder()
    missing = [name for name, key in GPT2_FILES.items() if not folder or not os.path.isfile(folder / key)]
    found = f"{' and '.join(missing) or 'sound files'} not in {folder or 'any cache folder'}"
    names = " and ".join(f"{name} (there named {key})" for name, key in GPT2_FILES.items())
    return (
        f"the gpt2 tokenizer cannot be loaded: {found}, and downloading failed ({reason}): "
        f"set TIKTOKEN_CACHE_DIR to a folder that holds {names}, or train a new model with --tokenizer bytes"
    )


def cache_folder() -> Path | None:
    """Return tiktoken's cache folder, by tiktoken's rules; None if it must not cache, or cannot."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if variable in os.environ:
            return Path(os.environ[variable]) if os.environ[variable] else None
    place = temporary_files()
    return place and place / "data-gym-cache"


TOKENIZERS = {"gpt2": gpt2_encoding, "bytes": byte_encoding}
VOCABULARY_SIZES = {"gpt2": GPT2_VOCABULARY, "bytes": 256}
