"""The windows that a run trains and validates on."""

from pathlib import Path

from gpt2.data import texts, windows
from gpt2.data.shards import open_shards
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from scripts.training.folder import default_run_folder
from strategies import find


def open_data(settings, config, global_batch: int, world) -> tuple[Windows, Windows | None]:
    """Training and validation windows, checked; a text is tokenized on rank 0, if the cache does not hold it yet.

    Collective: a mistake ends the job.
    """
    s, patterns = settings, (settings.train_data, settings.val_data)
    if not s.train_data:
        with world.together(UserError):
            if world.rank == 0:
                cache = Path(s.out or default_run_folder(find(s.strategy).name)).parent / "tokens"
                patterns = texts.prepare(Path(s.text) if s.text else None, s.tokenizer, cache)
        patterns = world.comm.bcast([str(path) for path in patterns])
    with world.together(UserError):
        train = Windows(open_shards(patterns[0]), s.seq_len, s.shuffle, s.seed)
        val = Windows(open_shards(patterns[1]), s.seq_len) if patterns[1] else None
        windows.check(train, global_batch, config.vocab_size, world.rank, world.size)
        if val:
            windows.check_tokens(val.shards, config.vocab_size, world.rank, world.size)
    return train, val
