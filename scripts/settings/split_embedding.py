"""Whether the token embedding is exchanged in two parts, by its two uses (--split-embedding): decided here alone.

As head it has a gradient at the very beginning of backward, and is used last in forward. As a table it has one at the
very end, and is used first; but only in the rows that are looked up. Where these are few, they travel apart, and the
rest beside computing.
"""

from fractions import Fraction

import numpy as np

from dist.cost.overlap import ALL_REDUCED, Timed, all_reduced_beside, least_all_reduced
from dist.cost.rows import Rows
from dist.looked_up import LookedUp
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.parameters import Layout
from scripts.settings.model_parallel import is_cut
from scripts.settings.training import Settings
from strategies import STRATEGIES, find, is_auto, names

# Different words among n of a text: 44 n^0.49 in the news of RCV1 (Manning, Raghavan, Schuetze 2008, section 5.1.1).
HEAPS_FACTOR, HEAPS_POWER = 44, 0.49
PAYS_UP_TO = 0.5  # of the vocabulary's rows: of more, what stays at the ends of a step is no less than half of before


def obstacle(s: Settings, ranks: int) -> str | None:
    """Why the embedding cannot be split, None if nothing is in the way. A strategy or backend may still be "auto"."""
    kind = None if is_auto(s.strategy) else find(s.strategy)
    if ranks == 1:
        return "one rank exchanges nothing"
    if s.overlap is False:
        return "without --overlap nothing is computed beside an exchange"
    if is_cut(s):
        return "ranks that share a model have the table and the head on different ranks, or parts of them"
    if kind and not kind.splits_embedding:
        others = names(other for other in STRATEGIES.values() if other.splits_embedding)
        return f"--strategy {kind.name} exchanges whole ranges, {others} can"
    if s.backend == "cupy":
        return "looked-up rows are exchanged in host memory, not between GPUs"
    return None


def check_split(s: Settings, ranks: int) -> None:
    """UserError where it is asked for and cannot be."""
    if s.split_embedding == "on" and (why := obstacle(s, ranks)):
        raise UserError(f"--split-embedding on: {why}: leave it out, or use auto")


def most_rows(s: Settings, config: GPT2Config) -> int:
    """That a rank's step can look up: those of all its tokens, and of what each window ends with."""
    return min(config.padded_vocab_size, s.grad_accum * s.batch_size * (s.seq_len + 1))


def expected_rows(s: Settings, config: GPT2Config, ranks: int, placement: list[int]) -> Rows | None:
    """What the ranks look up in a step, before any data is read; None where the embedding will be exchanged as a whole.
    placement: the node of each rank."""
    if s.split_embedding == "off" or obstacle(s, ranks):
        return None
    return rows_of_text(most_rows(s, config), config, placement, pays=s.split_embedding == "on")


def rows_of_text(tokens: int, config: GPT2Config, placement, pays: bool = False) -> Rows | None:
    """If each rank's step has so many tokens of a text; None if these are too many different ones to pay, unless it
    `pays` anyway. placement: the node of each rank."""
    vocabulary, ranks = config.padded_vocab_size, len(placement)

    def different(tokens: int) -> int:
        return int(min(vocabulary, tokens, HEAPS_FACTOR * tokens**HEAPS_POWER))

    if different(tokens) > PAYS_UP_TO * vocabulary and not pays:
        return None
    of_nodes = tuple(different(tokens * count) for count in np.bincount(placement).tolist())
    return Rows(config.n_embd, (different(tokens),) * ranks, of_nodes, different(tokens * ranks))


def is_split(s: Settings, ranks: int, rows: int, vocabulary: int, before: bool | None) -> tuple[bool, str]:
    """(whether it is, why). rows: the most that a rank looks up in the first step; before: what the run that this one
    goes on with did, None if it is none."""
    if why := obstacle(s, ranks):
        return False, why
    used = f"a step looks up {rows:,} of {vocabulary:,} rows"
    if s.split_embedding != "auto":
        return s.split_embedding == "on", f"as asked for; {used}"
    if before is not None:
        return before, f"as before; {used}"
    return rows <= PAYS_UP_TO * vocabulary, used


def settle_embedding(
    s: Settings, layout: Layout, train, step: int, facts: dict, before: dict, choice: dict, world
) -> dict:
    """What config.json says of it: "looked_up", the rows that the first step uses, and whether they go apart; and with
    overlap "embedding", how it is exchanged, in words. Of one rank, and where ranks share a model, no rows.

    step: the first that is made. choice: as choose_backend's, with what it "timed". facts, of every checkpoint, get
    `split_embedding` and `all_reduced`, and keep those of `before`, a checkpoint's of which this run exchanges alike,
    or {}: else it would add in another order, and round otherwise. Collective: also ends the job with one line where a
    split was asked for and cannot be.
    """
    with world.together(UserError):
        check_split(s, world.size)
    facts["split_embedding"] = False
    found, rows = {}, 0
    if world.size > 1 and not is_cut(s):
        first = (step - 1) * facts["global_batch"] + world.rank * s.grad_accum * s.batch_size
        found["looked_up"] = used_rows(train.tokens(first, s.grad_accum * s.batch_size), world)
        rows = max(found["looked_up"]["of_ranks"])
    if not s.overlap:
        return found
    was_split = before["split_embedding"] if before else None
    facts["split_embedding"], why = is_split(s, world.size, rows, layout.config.padded_vocab_size, was_split)
    wanted = least_all_reduced(Timed(**choice["timed"])) if choice.get("timed") else ALL_REDUCED
    share = all_reduced_beside(layout.by_name["wte"].stop / layout.count if facts["split_embedding"] else 0.0, wanted)
    share = kept_share(before, facts["split_embedding"], share)
    facts["all_reduced"] = [share.numerator, share.denominator]
    if facts["split_embedding"]:
        found["looked_up"]["apart"] = True
    said = "head and looked-up rows apart" if facts["split_embedding"] else "whole"
    return found | {"embedding": f"{said}: {why}"}


def kept_share(before: dict, is_split: bool, wanted: Fraction) -> Fraction:
    """Return the part of each bucket to all-reduce: the checkpoint's if that run overlapped, and split alike."""
    if "all_reduced" in before and before["split_embedding"] == is_split:
        return Fraction(*before["all_reduced"])
    return wanted


def used_rows(ids: np.ndarray, world) -> dict:
    """How many different rows each rank looks up, each node, and any rank. ids: this rank's. Collective."""
    everyone = world.comm.allgather(ids)
    of_nodes, any_rank = rows_of_nodes(everyone, world.places), len(np.unique(np.concatenate(everyone)))
    return {"of_ranks": [*map(len, everyone)], "of_nodes": of_nodes, "any": any_rank, "apart": False}


def new_lookup(s: Settings, buffers, layout: Layout) -> LookedUp:
    """Room for the rows of the token embedding that a step of this rank looks up."""
    return buffers.new_lookup(layout.by_name["wte"].shape, most_rows(s, layout.config))


def rows_of_nodes(ids: list[np.ndarray], places: list[dict]) -> list[int]:
    """How many different rows the ranks of each node look up. ids: each rank's."""
    nodes = [place["node"] for place in places]
    found = []
    for node in sorted(set(nodes)):
        found.append(len(np.unique(np.concatenate([own for own, its in zip(ids, nodes, strict=True) if its == node]))))
    return found
