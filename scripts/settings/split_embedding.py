"""Whether the token embedding is exchanged in two parts, by its two uses (--split-embedding): decided here alone.

As head it has a gradient at the very beginning of backward, and is used last in forward. As a table it has one at the
very end, and is used first; but only in the rows that are looked up. Where these are few, they travel apart, and the
rest beside computing.
"""

from gpt2.errors import UserError
from scripts.settings.model_parallel import is_cut
from scripts.settings.training import Settings
from strategies import STRATEGIES, find, is_auto, names

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
        return f"--strategy {kind.name} exchanges whole ranges; {others} can"
    if s.backend == "cupy":
        return "looked-up rows are exchanged in host memory, not between GPUs"
    return None


def check_split(s: Settings, ranks: int) -> None:
    """UserError where it is asked for and cannot be."""
    if s.split_embedding == "on" and (why := obstacle(s, ranks)):
        raise UserError(f"--split-embedding on: {why}: leave it out, or use auto")


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
