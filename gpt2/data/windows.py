"""The endless stream of windows that training and evaluation read. A window is T+1 tokens: T inputs and T targets.

The number w of the next window is all there is to store: it means window w % count of epoch w // count. It does not
depend on the number of ranks, so a run sees the same data on any number of ranks, and when it resumes.
"""

import hashlib
import zlib
from bisect import bisect_right
from itertools import accumulate, islice

import numpy as np

from gpt2.errors import UserError

SCAN_TOKENS = 1 << 20  # tokens that check_tokens reads together, 2 MiB; checkpoints' checksums depend on it
COMPARED_TOKENS = 4096  # at the beginning of each shard; facts() takes their checksum


class Windows:
    """Numbered windows over shards; each lies inside one shard and gives T predictions.

    Without shuffle, every epoch reads the shards in llm.c's order: window i of a shard begins at its token i*T. (llm.c
    drops the end of a shard that does not fill a global batch; here the batch goes on in the next shard.)

    With shuffle, epoch e has its own order of all windows and its own offset o in [0, T), drawn from (seed, e) alone:
    window i of a shard begins at o + i*T, so that no two epochs cut the text at the same places. A shard
    has (len-1)//T windows in every epoch. If the offset would push its last window beyond its end, that window begins
    at 0 instead, and covers the o tokens that the offset skips.
    """

    def __init__(self, shards, sequence_length: int, shuffle: bool = False, seed: int = 0):
        """Number the windows. shards: sequences of tokens whose slices are arrays (n,) uint16 (shards.py).

        UserError: T or seed out of range, no shard holds a window.
        """
        if sequence_length < 1:
            raise UserError(f"sequence length is {sequence_length}, expected at least 1: change --seq-len")
        if seed < 0:
            raise UserError(f"seed is {seed}, expected 0 or more: change --seed")
        self.shards = list(shards)
        self.sequence_length = sequence_length
        self.shuffle = shuffle
        self.seed = seed
        # Shard number s holds an epoch's windows first_window[s] .. first_window[s+1] - 1.
        self.first_window = [0, *accumulate((len(shard) - 1) // sequence_length for shard in self.shards)]
        if not self.count:
            raise UserError(
                f"{self.description}, expected one of {sequence_length + 1} or more: give more text or lower --seq-len"
            )
        self._epoch = None
        self._offset = 0
        self._order = None

    @property
    def count(self) -> int:
        """The number of windows in each epoch. Without shuffle, windows 0 .. count-1 are the whole set."""
        return self.first_window[-1]

    @property
    def token_count(self) -> int:
        return sum(map(len, self.shards))

    @property
    def description(self) -> str:
        """The amount of data and its source, for the beginning of a message."""
        lengths = [len(shard) for shard in self.shards]
        first = shard_name(self.shards[0], 0) if lengths else "no shards"
        others = f" and {len(lengths) - 1} more" if len(lengths) > 1 else ""
        return f"{first}{others}: {self.token_count} tokens in shards of at most {max(lengths, default=0)}"

    def facts(self, content: int) -> dict[str, int]:
        """Return facts that identify the data: counts and checksums of shards and tokens.

        content: the sum of the checksums that `check` returned for all parts.
        """
        beginnings = 0
        for shard in self.shards:
            beginnings = zlib.crc32(np.ascontiguousarray(shard[:COMPARED_TOKENS], "<u2"), beginnings)
        tokens = self.token_count
        return {"shards": len(self.shards), "tokens": tokens, "crc32": beginnings, "content": content % (1 << 64)}

    def read(self, first: int, inputs, targets) -> None:
        """Fill inputs and targets, both (B, T) int32, with windows first .. first+B-1 of the endless stream.

        targets[b, t] is the token that follows inputs[b, t]. Calls may come in any order, but ascending
        `first` is fastest: only one epoch's order is kept (4 bytes a window), and that of another epoch is drawn again.
        UserError: a shard's file was changed since it was opened.
        """
        T = self.sequence_length
        for row in range(len(inputs)):
            shard, start = self.locate(first + row)
            window = self.shards[shard][start : start + T + 1]
            inputs[row] = window[:-1]
            targets[row] = window[1:]

    def tokens(self, first: int, count: int) -> np.ndarray:
        """Return the tokens of windows first .. first+count-1 of the endless stream: int32, sorted, each once."""
        inputs, targets = np.empty((2, count, self.sequence_length), np.int32)
        self.read(first, inputs, targets)
        return np.union1d(inputs, targets)

    def locate(self, number: int) -> tuple[int, int]:
        """Return (shard, first token within it) of a window of the endless stream."""
        epoch, window = divmod(number, self.count)
        if self.shuffle:
            if epoch != self._epoch:
                random = np.random.default_rng([self.seed, epoch])
                self._offset = int(random.integers(self.sequence_length))
                self._order = np.arange(self.count, dtype=np.uint32)
                random.shuffle(self._order)
                self._epoch = epoch
            window = int(self._order[window])
        shard = bisect_right(self.first_window, window) - 1
        start = self._offset + (window - self.first_window[shard]) * self.sequence_length
        fits = start + self.sequence_length < len(self.shards[shard])
        return shard, start if fits else 0


def shard_name(shard, number: int) -> str:
    """Return a shard's path, or its number if it is an array without a path."""
    return str(getattr(shard, "path", None) or f"shard {number}")


def check(windows: Windows, global_batch: int, vocab_size: int, part: int = 0, parts: int = 1) -> int:
    """Raise a UserError if an epoch has fewer windows than a global batch, or a token is beyond the vocabulary.

    Only tokens of this part are checked. Returns the part's checksum, as check_tokens does.
    """
    if windows.count < global_batch:
        raise UserError(
            f"{windows.description}, {windows.count} windows of {windows.sequence_length} tokens, expected at least "
            f"{global_batch} for a global batch: give more text, or lower --batch-size, --grad-accum or --seq-len"
        )
    return check_tokens(windows.shards, vocab_size, part, parts)


def check_tokens(shards, vocab_size: int, part: int = 0, parts: int = 1) -> int:
    """Raise a UserError that names shard, position and id of the first token >= vocab_size in this part.

    Each rank can check its own part, 0 <= part < parts, of the blocks of SCAN_TOKENS. Only the rank whose part has the
    token raises. Returns the part's checksum. The sum of all parts' checksums, modulo 2^64, is the checksum of all
    tokens, for any number of parts.
    """
    blocks = ((number, start) for number, shard in enumerate(shards) for start in range(0, len(shard), SCAN_TOKENS))
    count = sum(-(-len(shard) // SCAN_TOKENS) for shard in shards)
    checksum = 0
    for number, start in islice(blocks, count * part // parts, count * (part + 1) // parts):
        tokens = shards[number][start : start + SCAN_TOKENS]
        if tokens.max() >= vocab_size:
            position = int(np.argmax(tokens >= vocab_size))
            raise UserError(
                f"{shard_name(shards[number], number)}: token {start + position} is {tokens[position]}, expected 0 to "
                f"{vocab_size - 1}: tokenize the text with the model's tokenizer, or raise --vocab-size"
            )
        # Include the block's place: a plain sum of CRCs would not change if two blocks were swapped.
        block = f"{number} {start} {zlib.crc32(np.ascontiguousarray(tokens, '<u2'))}"
        checksum += int.from_bytes(hashlib.blake2b(block.encode(), digest_size=8).digest())
    return checksum
