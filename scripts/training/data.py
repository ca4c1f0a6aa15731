"""The data of a run: windows of token shards, checked on all ranks before the run begins."""

from contextlib import suppress

from gpt2.data import windows
from gpt2.data.shards import open_shards
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from scripts.training.report import warn
from scripts.training.same_files import check_same_files, in_both


def open_data(
    world, patterns: tuple[str, str | None], length: int, shuffle: bool, seed: int, batch: int, vocab_size: int
) -> tuple[Windows, Windows | None, dict]:
    """Return training and validation windows, and facts about the former. Collective. End the job if they are bad.

    patterns: of the shards for training and validation; None: no validation. length: tokens of a sequence. batch:
    sequences of a step, on all ranks together.
    """
    with world.together(UserError):
        train = Windows(open_shards(patterns[0]), length, shuffle, seed)
        val = Windows(open_shards(patterns[1]), length) if patterns[1] else None
    check_same_files(world, [shard.path for part in (train, val) if part for shard in part.shards])
    if val and world.rank == 0:
        warn_of_same_files(train, val)
    with world.together(UserError):
        content = windows.check(train, batch, vocab_size, world.rank, world.size)
        if val:
            windows.check_tokens(val.shards, vocab_size, world.rank, world.size)
    return train, val, train.facts(world.comm.allreduce(content))


def warn_of_same_files(train: Windows, val: Windows) -> None:
    """Warn if files of the validation data are also training data."""
    with suppress(OSError):  # reading the file fails with the reason
        if same := in_both([shard.path for shard in val.shards], [shard.path for shard in train.shards]):
            more = f" and {len(same) - 1} more" if same[1:] else ""
            warn(f"{same[0]}{more}: both training and validation data, so val loss does not show overfitting")
