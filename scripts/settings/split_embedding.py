"""Decide whether the token embedding's two gradients are exchanged separately (--split-embedding).

The head's gradient is ready at the very beginning of backward, and forward uses the head last. The lookup's gradient is
ready at the very end, and forward uses the table first; but this gradient has only the rows that a step looks up. If
the rows are few, they are exchanged as a sparse gradient, and the head's dense gradient while the model computes.
"""

from dataclasses import dataclass

import numpy as np

from dist.cost.sparse_rows import Rows
from dist.sparse_gradient import SparseGradient
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.parameters import Layout
from scripts.settings.model_parallel import is_cut
from scripts.settings.training import Settings
from strategies import STRATEGIES, find, is_auto, names

# A text of n words has 44 n^0.49 different words (RCV1 news; Manning, Raghavan, Schuetze 2008, section 5.1.1).
HEAPS_FACTOR = 44
HEAPS_POWER = 0.49
PAYS_UP_TO = 0.5  # of the vocabulary's rows; with more, most of the exchange would stay at the ends of the step


def obstacle(settings: Settings, ranks: int) -> str | None:
    """Return why the embedding cannot be split, or None. Strategy and backend may still be "auto"."""
    kind = None if is_auto(settings.strategy) else find(settings.strategy)
    if ranks == 1:
        return "one rank exchanges nothing"
    if settings.overlap is False:
        return "without --overlap nothing is computed beside an exchange"
    if is_cut(settings):
        return "ranks that share a model have the table and the head on different ranks, or parts of them"
    if kind and not kind.traits.splits_embedding:
        others = names(other for other in STRATEGIES.values() if other.traits.splits_embedding)
        return f"--strategy {kind.name} exchanges whole ranges, {others} can"
    if settings.backend == "cupy":
        return "looked-up rows are exchanged in host memory, not between GPUs"
    return None


def check_split(settings: Settings, ranks: int) -> None:
    """Raise UserError if --split-embedding on is impossible."""
    if settings.split_embedding == "on" and (why := obstacle(settings, ranks)):
        raise UserError(f"--split-embedding on: {why}: leave it out, or use auto")


def most_rows(settings: Settings, config: GPT2Config) -> int:
    """Return the most rows that a rank can look up in a step: one for each token, including the last target."""
    return min(config.padded_vocab_size, settings.grad_accum * settings.batch_size * (settings.seq_len + 1))


def expected_rows(settings: Settings, config: GPT2Config, ranks: int, placement: list[int]) -> Rows | None:
    """Estimate, before data is read, the rows that ranks look up in a step; None if the embedding is not split.
    placement: the node of each rank."""
    if settings.split_embedding == "off" or obstacle(settings, ranks):
        return None
    return rows_of_text(most_rows(settings, config), config, placement, pays=settings.split_embedding == "on")


def rows_of_text(tokens: int, config: GPT2Config, placement, pays: bool = False) -> Rows | None:
    """Estimate the rows if each rank reads `tokens` tokens of text per step. placement: the node of each rank.
    Return None if a split would not pay; pays=True: the user has asked for it, so estimate in any case."""
    vocabulary = config.padded_vocab_size
    ranks = len(placement)

    def different(tokens: int) -> int:
        return int(min(vocabulary, tokens, HEAPS_FACTOR * tokens**HEAPS_POWER))

    if different(tokens) > PAYS_UP_TO * vocabulary and not pays:
        return None
    of_nodes = tuple(different(tokens * count) for count in np.bincount(placement).tolist())
    return Rows(config.n_embd, (different(tokens),) * ranks, of_nodes, different(tokens * ranks))


def is_split(settings: Settings, ranks: int, rows: int, vocabulary: int, before: bool | None) -> tuple[bool, str]:
    """Return whether the embedding is split, and why. rows: the most that any rank looks up in the first step.
    before: whether the checkpoint's run split it, None for a new run."""
    if why := obstacle(settings, ranks):
        return False, why
    used = f"a step looks up {rows:,} of {vocabulary:,} rows"
    if settings.split_embedding != "auto":
        return settings.split_embedding == "on", f"as asked for; {used}"
    if before is not None:
        return before, f"as before; {used}"
    return rows <= PAYS_UP_TO * vocabulary, used


@dataclass(frozen=True)
class EmbeddingExchange:
    """How a run exchanges the token embedding.

    is_split: whether looked-up rows are exchanged separately from the head's gradient. looked_up: how many rows the
    first step looks up (used_rows); None on one rank, or if ranks share a model. text: how the embedding is exchanged,
    and why; None without overlap.
    """

    is_split: bool = False
    looked_up: dict | None = None
    text: str | None = None

    def config_facts(self) -> dict:
        looked_up = self.looked_up and self.looked_up | {"apart": self.is_split}
        facts = {"looked_up": looked_up, "embedding": self.text}
        return {name: value for name, value in facts.items() if value is not None}


def plan_embedding(
    settings, layout: Layout, train, step: int, global_batch: int, before: dict, world
) -> EmbeddingExchange:
    """Decide how the token embedding is exchanged. Collective. End the job if a requested split is impossible.

    step: the first one of this start. global_batch: sequences of a step. before: the facts of the checkpoint that the
    run resumes from; {} without a checkpoint, or if the exchange has changed. An unchanged exchange must round alike.
    """
    with world.together(UserError):
        check_split(settings, world.size)
    looked_up = None
    rows = 0
    if world.size > 1 and not is_cut(settings):
        own = settings.grad_accum * settings.batch_size
        first = (step - 1) * global_batch + world.rank * own
        looked_up = used_rows(train.tokens(first, own), world)
        rows = max(looked_up["of_ranks"])
    if not settings.overlap:
        return EmbeddingExchange(looked_up=looked_up)
    was_split = before["split_embedding"] if before else None
    split, why = is_split(settings, world.size, rows, layout.config.padded_vocab_size, was_split)
    text = f"{'head and looked-up rows apart' if split else 'whole'}: {why}"
    return EmbeddingExchange(split, looked_up, text)


def used_rows(ids: np.ndarray, world) -> dict:
    """Count the different rows that each rank, each node and all ranks look up. ids: this rank's. Collective."""
    everyone = world.comm.allgather(ids)
    of_nodes = []
    for node in range(world.node_count):
        here = [own for own, place in zip(everyone, world.places, strict=True) if place["node"] == node]
        of_nodes.append(len(np.unique(np.concatenate(here))))
    any_rank = len(np.unique(np.concatenate(everyone)))
    return {"of_ranks": [*map(len, everyone)], "of_nodes": of_nodes, "any": any_rank}


def new_lookup(settings: Settings, buffers, layout: Layout) -> SparseGradient:
    """Return a buffer for the gradient of the token embedding's rows that a step of this rank looks up."""
    return buffers.new_sparse_gradient(layout.by_name["wte"].shape, most_rows(settings, layout.config))
