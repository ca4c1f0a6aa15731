"""Answers that a machine gives once: kept for the user's next programs, and for the other ranks that ask at once.

An answer is a small file, named by a hash of all that it depends on, which it also holds. It lies in the user's cache
folder (gpt2/files.py). Where there is none, everybody finds the answer by himself: nobody waits for ever, and nothing
ends of it.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpt2.errors import UserError
from gpt2.files import alone, read_bytes, user_cache_folder, write_json

WAIT_S = 15.0  # for another process that finds the answer; then this one finds it, too


def once(name: str, facts: dict, find: Callable[[], dict], is_usable: Callable[[dict], bool]) -> dict:
    """The answer that is kept for these facts, which JSON can hold; without one, what find() returns, which is kept.

    Of several processes that ask at once, one finds it and the others wait. is_usable: whether a kept one may be taken.
    """
    path = place_of(name, facts)
    if path is None:
        return find()
    if (answer := read(path, facts, is_usable)) is not None:
        return answer
    with alone(path.with_suffix(".lock"), WAIT_S):
        answer = read(path, facts, is_usable)
        if answer is None:
            write(path, facts, answer := find())
        return answer


def place_of(name: str, facts: dict) -> Path | None:
    """The file of an answer, whether it is there or not; None where nothing can be kept."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    folder = user_cache_folder()
    return folder and folder / f"{name}-{digest}.json"


def read(path: Path | None, facts: dict, is_usable: Callable[[dict], bool]) -> dict | None:
    """The answer in a file, if it is one to these facts and can be used."""
    try:
        kept = json.loads(read_bytes(path)) if path else None
        return kept["answer"] if kept and kept["facts"] == facts and is_usable(kept["answer"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return None  # there is none, or another hand has been at it


def write(path: Path | None, facts: dict, answer: dict) -> None:
    with suppress(UserError, OSError):  # a full disk: it is found again
        if path:
            write_json(path, {"facts": facts, "answer": answer})
