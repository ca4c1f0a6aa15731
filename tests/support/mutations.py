"""Damage to files, drawn from a seed: bits and blocks of any file, values and structure of JSON; and a loop over it."""

import copy
import json
import random
import resource
import signal
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REFUSED, PART, ORIGINAL, ANOTHER = "refused", "in part, and said", "as the original", "as another"
SECONDS_EACH = 10  # of computing: a reader that takes longer hangs
MEMORY_BYTES = 1 << 30  # beyond what the process has: a reader that asks for more believes a damaged header

EXTREMES = (
    *(struct.pack("<i", value) for value in (0, 1, -1, 2**31 - 1, -(2**31))),
    *(struct.pack("<q", value) for value in (0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63))),
    *(struct.pack(code, value) for code in ("<f", "<d") for value in (float("nan"), float("inf"), -1.0, 1e30)),
)
ODD_VALUES = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.5, 1e-320, 1e300, float("nan"),
    float("inf"), "", "x", "a\nb", "\ud800", "\u202e$x^$", "0", "../..", "x" * 5000, [], {}, [None], [[1]], {"a": 1},
)  # fmt: skip
DEPTH = 100_000


class Mutator:
    """Each call gives one damaged copy of `content`."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def of_bytes(self, content: bytes, head: int = 0) -> bytes:
        """One to three changes; half of the places lie in the first `head` bytes."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            content = self.random.choice(BYTE_CHANGES)(self, content, head)
        return content

    def of_json(self, text: bytes) -> bytes:
        """A JSON value with one to three others at random places; sometimes damaged as text."""
        if self.random.random() < 0.2:
            return self.random.choice((*BYTE_CHANGES, *TEXT_CHANGES))(self, text, 0)
        value = json.loads(text)
        for _ in range(self.random.choice((1, 1, 2, 3))):
            value = self.changed_value(value)
        return json.dumps(value, ensure_ascii=self.random.random() < 0.5).encode("utf-8", "surrogatepass")

    def of_lines(self, text: bytes) -> bytes:
        """Lines of JSON: one line changed as in of_json, lines deleted, doubled or swapped, or the end cut off."""
        lines = text.splitlines(keepends=True)
        at, other = (self.random.randrange(len(lines)) for _ in range(2))
        change = self.random.randrange(8)
        if change == 0:
            del lines[at]
        elif change == 1:
            lines.insert(other, lines[at])
        elif change == 2:
            lines[at], lines[other] = lines[other], lines[at]
        elif change == 3:
            return text[: self.random.randrange(len(text))]
        else:
            lines[at] = self.of_json(lines[at].rstrip(b"\n")) + b"\n"
        return b"".join(lines)

    def of_header_and_records(self, content: bytes, itemsize: int) -> bytes:
        """A line of JSON and fixed-size records after it: the line, a field, whole records, or any bytes."""
        line, _, records = content.partition(b"\n")
        change = self.random.randrange(4)
        if change == 0:
            return self.of_json(line) + b"\n" + records
        if change == 1:
            return self.of_bytes(content, len(line))
        if change == 2:
            return line + b"\n" + self.extreme_number(records, 0)
        whole = [records[at : at + itemsize] for at in range(0, len(records), itemsize)]
        return line + b"\n" + self.of_items(whole)

    def of_sized_header(self, content: bytes) -> bytes:
        """Eight bytes of length, a JSON header so long, data (safetensors): the header's values; sizes stay right."""
        length = int.from_bytes(content[:8], "little")
        header = self.of_json(content[8 : 8 + length])
        if len(header) <= length:  # as far as it fits, no byte of the file moves
            return content[:8] + header.ljust(length) + content[8 + length :]
        return len(header).to_bytes(8, "little") + header + content[8 + length :]

    def of_items(self, items: list[bytes]) -> bytes:
        at, other = (self.random.randrange(len(items)) for _ in range(2))
        change = self.random.randrange(3)
        if change == 0:
            del items[at]
        elif change == 1:
            items.insert(other, items[at])
        else:
            items[at], items[other] = items[other], items[at]
        return b"".join(items)

    # --- changes of bytes ---

    def place(self, content: bytes, head: int) -> int:
        low = head and self.random.random() < 0.5
        return self.random.randrange(max(1, min(head, len(content)) if low else len(content)))

    def flip_bit(self, content: bytes, head: int) -> bytes:
        changed, at = bytearray(content), self.place(content, head)
        if changed:
            changed[at] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def overwrite(self, content: bytes, head: int) -> bytes:
        at, size = self.place(content, head), self.random.choice((1, 2, 4, 8, 64, 512))
        filling = self.random.choice((b"\x00" * size, b"\xff" * size, self.random.randbytes(size)))
        return content[:at] + filling[: len(content) - at] + content[at + size :]

    def extreme_number(self, content: bytes, head: int) -> bytes:
        at, number = self.place(content, head) // 4 * 4, self.random.choice(EXTREMES)
        return content[:at] + number[: len(content) - at] + content[at + len(number) :]

    def truncate(self, content: bytes, head: int) -> bytes:
        return content[: self.place(content, head)]

    def extend(self, content: bytes, head: int) -> bytes:
        return content + self.random.randbytes(self.random.choice((1, 2, 4, 36, 1000)))

    def delete_block(self, content: bytes, head: int) -> bytes:
        at = self.place(content, head)
        return content[:at] + content[at + self.random.choice((1, 2, 4, 36, 100)) :]

    def double_block(self, content: bytes, head: int) -> bytes:
        at, size = self.place(content, head), self.random.choice((1, 2, 4, 36, 100))
        return content[: at + size] + content[at:]

    def swap_blocks(self, content: bytes, head: int) -> bytes:
        size = self.random.choice((1, 2, 4, 8, 36))
        one, other = sorted((self.place(content, head), self.place(content, 0)))
        if other - one < size:
            return self.flip_bit(content, head)
        first, second = content[one : one + size], content[other : other + size]
        return content[:one] + second + content[one + size : other] + first + content[other + size :]

    # --- changes of JSON ---

    def changed_value(self, value):
        """A copy with one thing changed: a value replaced, removed or moved to another's place."""
        value = copy.deepcopy(value)
        places = list(_places(value))
        if not places:
            return self.random.choice(ODD_VALUES)
        holder, key = self.random.choice(places)
        change = self.random.randrange(4)
        if change == 0:
            del holder[key]
        elif change == 1:
            other, name = self.random.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif change == 2 and type(holder[key]) in (int, float) and abs(holder[key]) < 2**63:
            holder[key] *= self.random.choice((-1, 2, 1 + 1e-9, 1e6, 2**40))
        else:
            holder[key] = self.random.choice(ODD_VALUES)
        return value

    def double_key(self, text: bytes, head: int) -> bytes:
        opened = [at for at, byte in enumerate(text) if byte == ord("{")]
        if not opened:
            return text
        at, name = self.random.choice(opened) + 1, text[self.place(text, 0) :].partition(b'"')[2].partition(b'"')[0]
        return text[:at] + b'"' + name + b'": 1,' + text[at:]

    def nest_deep(self, text: bytes, head: int) -> bytes:
        opening, closing = self.random.choice(((b"[", b"]"), (b'{"a":', b"}")))
        at, depth = text.find(b": ") + 2, self.random.choice((500, 900, DEPTH))
        return text[:at] + opening * depth + b"1" + closing * depth + b"," + text[at:]

    def break_utf8(self, text: bytes, head: int) -> bytes:
        at = self.place(text, 0)
        return text[:at] + self.random.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf")) + text[at:]


BYTE_CHANGES = (
    Mutator.flip_bit, Mutator.overwrite, Mutator.extreme_number, Mutator.truncate, Mutator.extend,
    Mutator.delete_block, Mutator.double_block, Mutator.swap_blocks,
)  # fmt: skip
TEXT_CHANGES = (Mutator.double_key, Mutator.nest_deep, Mutator.break_utf8)


def _places(value):
    """(holder, key or index) of everything inside a JSON value."""
    keys = value.keys() if type(value) is dict else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


@dataclass(frozen=True)
class Damaged:
    """A file that is going to be damaged, and what reads it.

    mutate(mutator, content) -> bytes. read(): what is made of the file, or one of `errors`, whose text is one line that
    names `named` (default: the file). judge(mutant, value): AssertionError where the value is not what the mutant says,
    or where the value None, a refusal, is wrong. content(value): equal for values that are equal. lacks(value): whether
    the value says that a part was left out. least: of a hundred mutants so many are read whole, on average.
    """

    path: Path
    mutate: Callable
    read: Callable
    errors: type[Exception]
    judge: Callable
    named: Path | None = None
    content: Callable = lambda value: value
    lacks: Callable = lambda value: False
    least: float = 0


def read_mutants(case: Damaged, count: int, seed: int = 0) -> Counter:
    """Write `count` mutants of the case's file, one after another, and read each; at the end the file is whole.

    Returns how many were REFUSED, read in PART, read as the ORIGINAL, read as ANOTHER. What `judge` objects to,
    anything else that is raised, a hang, and more memory than a small file can need go through, with a note by which
    mutant. Each mutant has its own random numbers, from `seed` and its number.
    """
    whole, found = case.path.read_bytes(), Counter()
    original = case.content(case.read())
    try:
        for number in range(count):
            mutant = case.mutate(Mutator((seed << 32) + number), whole)
            case.path.write_bytes(mutant)
            try:
                found[_outcome(case, mutant, number, original)] += 1
            except BaseException as error:
                error.add_note(f"seed {seed}, mutant {number} of {case.path}: {mutant[:600]!r}")
                raise
    finally:
        case.path.write_bytes(whole)
    return found


def _outcome(case: Damaged, mutant: bytes, number: int, original) -> str:
    try:
        with limited():
            value = case.read()
    except case.errors as error:
        check_message(error, case.named or case.path, number)
        case.judge(mutant, None)
        return REFUSED
    case.judge(mutant, value)
    if case.lacks(value):
        return PART
    return ORIGINAL if case.content(value) == original else ANOTHER


def check_message(error: Exception, named: Path, number: int) -> None:
    text = str(error)
    assert str(named) in text, f"mutant {number}: {text!r} does not name {named}"
    assert text.isprintable(), f"mutant {number}: {text!r} is not one line that can be printed"
    assert len(text) < 1500, f"mutant {number}: {len(text)} characters are no clear line"


@contextmanager
def limited():
    """TimeoutError in what takes too long, MemoryError in what takes too much."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def _too_long(*signal_and_frame):
    raise TimeoutError(f"a reader took longer than {SECONDS_EACH} s")
