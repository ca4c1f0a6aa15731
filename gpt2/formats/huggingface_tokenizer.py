"""The files by which transformers' AutoTokenizer is a model's tokenizer: a byte-level BPE, made of tiktoken's ranks.

    vocab.json, merges.txt    of the slow tokenizers: tokens with their ids; pairs that are merged, the first ones first
    tokenizer.json            the same and what is done around it, for the package tokenizers
    tokenizer_config.json     which class reads them, and the special tokens; special_tokens_map.json the latter again

A token's bytes are written as text, each byte as a character of its own that can be printed (GPT-2's encoder.py,
bytes_to_unicode, https://github.com/openai/gpt-2/blob/master/src/encoder.py).
"""

import hashlib
import json
from functools import cache
from operator import itemgetter
from pathlib import Path

import tiktoken

from gpt2.data.tokenizers import END_OF_TEXT
from gpt2.formats.huggingface_config import read_json

# One token a character: merges are none, so it does not matter where a text is cut, and nothing is cut.
BYTES_CLASS, GPT2_CLASS = "PreTrainedTokenizerFast", "GPT2Tokenizer"
# By vocabulary_hash: comparing hashes needs none of tiktoken's files.
NAMES = {
    "8f1c046ab87201d64780f75892556c8a0697aeb493efec91776b0cdf2e411d7b": "gpt2",
    "5b0e580d1091a86a8c230d29b98703beccc25719040803bd98cde9e182b943aa": "bytes",
}
OTHER = "other"


@cache
def byte_characters() -> dict[int, str]:
    """{byte: the character that stands for it}: itself where it can be printed and is no space, else one beyond 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that are merged, in the order of the ranks of what they make. ranks: {token: its rank}.

    Each longer token was made of two earlier ones: those that remain of its bytes when all earlier merges are done.
    """
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _split(token, rank, ranks)
            pairs.append((left, right))
    return pairs


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
    """Write the files into a folder that is there. encoding: as gpt2/data/tokenizers.py makes them. context: how
    many tokens the model reads. Where the encoding merges nothing, slow tokenizers, which want merges, have no files.
    """
    vocabulary, special = vocabulary_of(encoding), encoding._special_tokens
    merges = [f"{as_text(left)} {as_text(right)}" for left, right in merges_of(encoding._mergeable_ranks)]
    with_special = vocabulary | special
    if merges:
        _write(folder / "vocab.json", with_special)
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    _write(folder / "tokenizer.json", described(vocabulary if not merges else with_special, merges, special))
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) if END_OF_TEXT in special else {}
    settings = {"tokenizer_class": GPT2_CLASS if merges else BYTES_CLASS, "model_max_length": context}
    settings |= {"add_prefix_space": False, "clean_up_tokenization_spaces": False}
    _write(folder / "tokenizer_config.json", settings | named)
    _write(folder / "special_tokens_map.json", named)


def as_text(token: bytes) -> str:
    return "".join(byte_characters()[byte] for byte in token)


def vocabulary_of(encoding: tiktoken.Encoding) -> dict[str, int]:
    """{token as text: its id}, in the order of the ids, without the special ones."""
    return {as_text(token): rank for token, rank in sorted(encoding._mergeable_ranks.items(), key=itemgetter(1))}


def tokenizer_of_folder(folder: Path) -> str | None:
    """Name the tokenizer whose vocabulary lies in a folder: "gpt2", "bytes", or OTHER; None if there is none.

    Many a GPT-2 of another language has as many tokens as the English one, so each token and its id count. UserError:
    the file is damaged.
    """
    for name, within in (("tokenizer.json", ["model", "vocab"]), ("vocab.json", [])):
        if (folder / name).is_file():
            found = read_json(folder / name, "a tokenizer's vocabulary")
            for key in within:
                found = found.get(key) if isinstance(found, dict) else None
            return NAMES.get(vocabulary_hash(found), OTHER) if isinstance(found, dict) else OTHER
    return None


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    """SHA-256 (hex) of the tokens and their ids, without end-of-text, which only some of the files list."""
    ordinary = sorted((token, number) for token, number in vocabulary.items() if token != END_OF_TEXT)
    return hashlib.sha256(json.dumps(ordinary).encode()).hexdigest()


def described(vocabulary: dict[str, int], merges: list[str], special: dict[str, int]) -> dict:
    """tokenizer.json, as the package tokenizers reads it."""
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
        "pre_tokenizer": byte_level,  # its expression is GPT-2's, by which tiktoken cuts a text, too
        "post_processor": byte_level | {"trim_offsets": False},
        "decoder": byte_level,
        "model": model | {"fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": merges},
    }


def write_generation_config(path: Path, end_of_text: int | None) -> None:
    """generation_config.json: what `generate` begins and ends with; null where the vocabulary has no such token."""
    _write(path, {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text})


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
