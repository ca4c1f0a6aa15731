"""Write the files that transformers' AutoTokenizer needs: a byte-level BPE, from tiktoken's ranks.

    vocab.json, merges.txt    for the slow tokenizers: {token: id}; the merged pairs in order
    tokenizer.json            for the package `tokenizers`: the same, with all settings
    tokenizer_config.json     the tokenizer's class and special tokens; special_tokens_map.json repeats the latter

A token's bytes are written as text, with a printable character for each byte (GPT-2's encoder.py, bytes_to_unicode,
https://github.com/openai/gpt-2/blob/master/src/encoder.py).
"""

import hashlib
import json
from functools import cache
from operator import itemgetter
from pathlib import Path

import tiktoken

from gpt2.data.tokenizers import END_OF_TEXT
from gpt2.formats.huggingface_config import read_json, write_json

BYTES_CLASS = "PreTrainedTokenizerFast"  # merges nothing
GPT2_CLASS = "GPT2Tokenizer"
# {vocabulary_hash: tokenizer}. Comparing hashes needs none of tiktoken's files.
NAMES = {
    "8f1c046ab87201d64780f75892556c8a0697aeb493efec91776b0cdf2e411d7b": "gpt2",
    "5b0e580d1091a86a8c230d29b98703beccc25719040803bd98cde9e182b943aa": "bytes",
}
OTHER = "other"


@cache
def byte_characters() -> dict[int, str]:
    """Return {byte: its character}: the byte itself if it is printable and no space, else a character beyond 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the merged pairs, in the order of the merged tokens' ranks. ranks: {token: rank}.

    Each longer token was merged from two earlier ones. All earlier merges, applied to its bytes, leave these two.
    """
    in_order = sorted(ranks.items(), key=itemgetter(1))
    return [_split(token, rank, ranks) for token, rank in in_order if len(token) > 1]


def _split(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [(ranks.get(parts[place] + parts[place + 1], rank), place) for place in range(len(parts) - 1)]
        lowest, place = min(found)
        if lowest >= rank:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    if len(parts) != 2:
        raise ValueError(f"token {rank}, {token!r}, is not made of two tokens of lower rank")
    return tuple(parts)


def write_tokenizer(folder: Path, encoding: tiktoken.Encoding, context: int) -> None:
    """Write the files into an existing folder. encoding: from gpt2/data/tokenizers.py. context: of the model.

    Slow tokenizers need merges, so they get no files if the encoding has none.
    """
    vocabulary = vocabulary_of(encoding)
    special = encoding._special_tokens
    merges = [f"{as_text(left)} {as_text(right)}" for left, right in merges_of(encoding._mergeable_ranks)]
    with_special = vocabulary | special
    if merges:
        write_json(folder / "vocab.json", with_special)
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    write_json(folder / "tokenizer.json", described(vocabulary if not merges else with_special, merges, special))
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) if END_OF_TEXT in special else {}
    settings = {"tokenizer_class": GPT2_CLASS if merges else BYTES_CLASS, "model_max_length": context}
    settings |= {"add_prefix_space": False, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings | named)
    write_json(folder / "special_tokens_map.json", named)


def as_text(token: bytes) -> str:
    return "".join(byte_characters()[byte] for byte in token)


def vocabulary_of(encoding: tiktoken.Encoding) -> dict[str, int]:
    """Return {token as text: id}, in the order of ids, without special tokens."""
    return {as_text(token): rank for token, rank in sorted(encoding._mergeable_ranks.items(), key=itemgetter(1))}


def tokenizer_of_folder(folder: Path) -> str | None:
    """Return the name of the tokenizer in a folder: "gpt2", "bytes", or OTHER; None if there is none.

    All tokens and ids are compared: a GPT-2 of another language often has as many tokens. UserError: a file is damaged.
    """
    for name, within in (("tokenizer.json", ["model", "vocab"]), ("vocab.json", [])):
        if (folder / name).is_file():
            found = read_json(folder / name, "a tokenizer's vocabulary")
            for key in within:
                found = found.get(key) if isinstance(found, dict) else None
            return NAMES.get(vocabulary_hash(found), OTHER) if isinstance(found, dict) else OTHER
    return None


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    """Return the SHA-256 (hex) of tokens and ids, without end-of-text, which some files do not list."""
    ordinary = sorted((token, number) for token, number in vocabulary.items() if token != END_OF_TEXT)
    return hashlib.sha256(json.dumps(ordinary).encode()).hexdigest()


def described(vocabulary: dict[str, int], merges: list[str], special: dict[str, int]) -> dict:
    """Return the content of tokenizer.json."""
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": bool(merges)}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name} | added for name, number in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,  # it uses GPT-2's regular expression, as tiktoken does
        "post_processor": byte_level | {"trim_offsets": False},
        "decoder": byte_level,
        "model": model | {"fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": merges},
    }
