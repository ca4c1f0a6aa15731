"""A model that nothing divides evenly, in pieces, and checkpoints of it: what the files' tests know by heart.

whole = arrays()                                        {"parameters", "m", "v": (count,) float32}
folder = write(tmp_path, whole, layers=(2, 3), parts=2)
"""

from pathlib import Path

import numpy as np

from dist.ranges import cut
from gpt2.config import GPT2Config
from gpt2.formats import checkpoint_files, checkpoints
from gpt2.model_shards import ModelShard, model_shards
from gpt2.parameters import Layout

CONFIG = GPT2Config(n_layer=5, n_head=5, n_embd=15, context=8, vocab_size=131)
WHOLE = Layout(CONFIG)
CUTS = [((5,), 1), ((5,), 2), ((2, 1, 2), 1), ((3, 2), 2), ((1, 4, 0), 1), ((1, 3, 1), 3)]  # layers of stages, parts


def arrays(seed: int = 7) -> dict[str, np.ndarray]:
    """A state of the whole model: every number another one, wte's pad rows 0."""
    random = np.random.default_rng(seed)
    found = {name: random.standard_normal(WHOLE.count).astype(np.float32) for name in checkpoints.STATE}
    for values in found.values():
        values[CONFIG.vocab_size * CONFIG.n_embd : WHOLE.by_name["wte"].stop] = 0.0
    return found


def of_piece(values: np.ndarray, layout: Layout) -> np.ndarray:
    """(size,): what a piece holds of the whole model's values, in its own numbering, and its pad of 0."""
    flat = np.zeros(layout.size, np.float32)
    for tensor in layout.tensors:
        whole = WHOLE.by_name[tensor.name]
        flat[tensor.start : tensor.stop] = (
            values[whole.start : whole.stop].reshape(whole.whole_shape)[tensor.slices].reshape(-1)
        )
    return flat


def layouts(layers, parts: int, multiple_of: int = 1) -> list[Layout]:
    return [Layout(CONFIG, multiple_of, shard) for shard in model_shards(layers, parts)]


def prefix(layers, shard: ModelShard, parts: int) -> str:
    """What the names of a piece's arrays begin with."""
    if len(layers) == parts == 1:
        return ""
    return f"s{model_shards(layers, parts).index(shard) // parts}t{shard.tp_rank}_"


def write_parts(folder: Path, whole: dict, layers, parts: int, copies: int = 2, step: int = 7, run: str = "c" * 32):
    """What `complete` is to be given of a checkpoint: each piece written by as many ranks as there are copies."""
    part, files = folder / f"{checkpoints.folder_name(step)}.part", {}
    folder.mkdir(exist_ok=True, parents=True)
    for layout in layouts(layers, parts):
        begin = prefix(layers, layout.shard, parts)
        held = {begin + name: of_piece(values, layout) for name, values in whole.items()}
        for start, stop in cut(layout.count, copies):
            ranges = [(name, start, values[start:stop]) for name, values in held.items()]
            rank = len(files)
            files[checkpoint_files.rank_file(rank)] = checkpoint_files.write_part(part, step, rank, ranges, run)
    facts = {"run": run, "step": step} | checkpoints.model_facts(WHOLE)
    return part, facts | checkpoints.cut_facts(CONFIG, layers, parts), files


def write(folder: Path, whole: dict, layers, parts: int, **options) -> Path:
    return checkpoints.complete(*write_parts(folder, whole, layers, parts, **options))
