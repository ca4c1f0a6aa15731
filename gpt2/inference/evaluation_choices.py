"""Multiple-choice evaluations such as HellaSwag (Zellers et al. 2019), from llm.c's token files.

The format (llm.c, dev/data/data_common.py, write_evalfile), little-endian throughout:

    256 int32   header: [0] = 20240522, [1] = 1, [2] = number of examples, [3] = bytes of the longest, the rest 0
    uint16      the examples, one after another, each:
                65535, bytes of this example, its index (0, 1, ...), its label, number of endings E (llm.c: always 4),
                n and the n tokens of the context, then E times n and the n tokens of an ending

The label is the number of the correct ending. llm.c's files hold GPT-2's tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2.config import GPT2Config
from gpt2.errors import UserError, file_errors
from gpt2.formats.llmc_header import CHOICES_MAGIC, HEADER_BYTES, read_header
from gpt2.inference.evaluation import Scorer

CHOICES_VERSION = 1
START = 65535
FIXED = 6  # uint16 before the context's tokens


@dataclass(frozen=True)
class Example:
    """Tokens (n,) uint16 of a context and of each possible ending; label: which ending is correct."""

    index: int
    label: int
    context: np.ndarray
    endings: list[np.ndarray]


def read_examples(path: Path) -> list[Example]:
    """Read all examples of a file. UserError: missing, another kind of file or version, truncated, damaged."""
    header, size = read_header(path, CHOICES_MAGIC)
    _, version, count = header[:3]
    if version != CHOICES_VERSION:
        raise UserError(
            f"{path}: multiple-choice evaluation of version {version}, expected {CHOICES_VERSION}: make it with "
            "llm.c's hellaswag.py"
        )
    if count < 1:
        raise UserError(f"{path}: its header promises {count} examples, expected at least 1: write or copy it again")
    if size % 2:
        raise _damaged(path, f"{size} bytes, which end within a token")
    with file_errors(path, "cannot read it; check the disk"):
        stream = np.fromfile(path, "<u2", offset=HEADER_BYTES)
    examples = []
    place = 0
    for index in range(count):
        if place == len(stream):
            raise _damaged(path, f"ends after {index} examples of the {count} that its header promises")
        example, place = _read_example(path, stream, place, index)
        examples.append(example)
    if place != len(stream):
        raise _damaged(path, f"{2 * (len(stream) - place)} bytes follow the last of its {count} examples")
    return examples


def _read_example(path: Path, stream: np.ndarray, place: int, index: int) -> tuple[Example, int]:
    """Return the example that begins at `place`, and where the next one begins."""
    head = stream[place : place + FIXED].tolist()
    if head[0] != START:
        raise _damaged(path, f"example {index} begins with {head[0]}, expected {START}")
    if len(head) < FIXED or place + head[1] // 2 > len(stream):
        raise _damaged(path, f"ends within example {index}")
    _, length, found_index, label, ending_count, _ = head
    example = stream[place : place + length // 2]
    if found_index != index:
        raise _damaged(path, f"example {index} says that it is number {found_index}")
    parts = []
    at = FIXED - 1
    for _ in range(1 + ending_count):
        stop = at + 1 + (int(example[at]) if at < len(example) else 0)
        parts.append(example[at + 1 : stop])
        at = stop
    if length % 2 or at != len(example) or ending_count < 2 or label >= ending_count or not all(map(len, parts)):
        found = f"{ending_count} endings, label {label}, lengths {', '.join(str(len(part)) for part in parts[:8])}"
        raise _damaged(path, f"example {index} of {length} bytes with {found} does not add up")
    return Example(index, label, parts[0], parts[1:]), place + len(example)


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}: the evaluation file is damaged, write or copy it again")


def check_examples(path: Path, examples: list[Example], config: GPT2Config, most: int) -> None:
    """Raise a UserError unless the model can read all examples. most: how many context positions were trained."""
    for example in examples:
        longest = len(example.context) + max(map(len, example.endings))
        if longest > most:
            what = f"the model's context, {most}"
            advice = "evaluate a model with a longer one"
            if most < config.context:
                what = f"{most}, as positions {most} to {config.context - 1} of the model are untrained"
                advice = "evaluate a model that was trained on longer sequences, or raise --seq-len to use them"
            raise UserError(f"{path}: example {example.index} has {longest} tokens, expected at most {what}: {advice}")
        token = max(int(part.max()) for part in (example.context, *example.endings))
        if token >= config.vocab_size:
            raise UserError(
                f"{path}: example {example.index} has token {token}, expected 0 to {config.vocab_size - 1}: such files "
                "hold GPT-2's tokens, evaluate a model of that vocabulary"
            )


def count_correct(scorer: Scorer, examples: list[Example]) -> tuple[int, int]:
    """Return (correct, correct with normalization): how many examples the model answers correctly.

    The model chooses the ending with the lowest sum of losses, the most probable one; with normalization, the one with
    the lowest mean loss per token. Ties go to the first ending. These are acc and acc_norm of llm.c's hellaswag.py.
    (EleutherAI's harness has the same acc, but its acc_norm divides by an ending's characters.)
    """
    rows = [np.concatenate([each.context, ending]) for each in examples for ending in each.endings]
    losses = iter(scorer.losses(rows))
    correct = normalized = 0
    for each in examples:
        of_endings = [next(losses)[len(each.context) - 1 :] for _ in each.endings]
        correct += int(np.argmin([row.sum() for row in of_endings])) == each.label
        normalized += int(np.argmin([row.mean() for row in of_endings])) == each.label
    return correct, normalized
