"""A finding: what is wrong or worth knowing, how much it matters, and its fix; and the words for where it was found.

Checks are pure generators: check(ranks, model) yields Findings, of the facts of all ranks, in their order, and the name
of the model that is asked for, or None. Facts that could not be gathered are missing, and a check passes them over.
"""

from collections import defaultdict
from dataclasses import dataclass

FAIL, SLOW, NOTE = "will fail", "will be slow", "note"
SEVERITIES = (FAIL, SLOW, NOTE)
MOST_HOSTS = 4


@dataclass(frozen=True)
class Finding:
    """severity: one of SEVERITIES; about: one or two words; text: what was found and where; fix: what to do."""

    severity: str
    about: str
    text: str
    fix: str


def known(ranks: list[dict], *path: str) -> list[tuple[dict, object]]:
    """(facts, value) of the ranks that have something at facts[path[0]][path[1]]..."""
    found = []
    for facts in ranks:
        value = facts
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found.append((facts, value))
    return found


def nodes(ranks: list[dict]) -> dict[int, list[dict]]:
    """The facts of each node's ranks."""
    found = defaultdict(list)
    for facts in ranks:
        found[facts["place"]["node"]].append(facts)
    return dict(found)


def first_of_nodes(ranks: list[dict]) -> list[dict]:
    """For what is the same for all ranks of a node."""
    return [members[0] for members in nodes(ranks).values()]


def on_hosts(some: list[dict]) -> str:
    """ "node1", "node1 and node2", "node1, node2, node3 and 5 more hosts"."""
    hosts = list(dict.fromkeys(facts["place"]["host"] for facts in some))
    if len(hosts) > MOST_HOSTS:
        return f"{', '.join(hosts[: MOST_HOSTS - 1])} and {len(hosts) - MOST_HOSTS + 1} more hosts"
    return hosts[0] if len(hosts) == 1 else f"{', '.join(hosts[:-1])} and {hosts[-1]}"


def on_ranks(some: list[dict]) -> str:
    """ "rank 3 on node1", "ranks 0-2 and 5 on node0 and node1"."""
    numbers = rank_list([facts["place"]["rank"] for facts in some])
    return f"rank{'s' * (len(some) > 1)} {numbers} on {on_hosts(some)}"


def rank_list(numbers: list[int]) -> str:
    """ "0-2 and 5" of 0, 1, 2, 5."""
    parts = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in parts]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def different(pairs: list[tuple[dict, object]]) -> str | None:
    """ "1.2 on node0, 1.3 on node1 and node2" where the values of `known` differ; None where they do not."""
    holders = defaultdict(list)
    for facts, value in pairs:
        holders[str(value)].append(facts)
    if len(holders) < 2:
        return None
    return "; ".join(f"{value} on {on_hosts(some)}" for value, some in holders.items())


def plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
