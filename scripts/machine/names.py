"""Format ranks, hosts and exceptions for a sentence."""

from collections.abc import Iterable
from itertools import groupby

MOST_HOSTS = 4


def rank_names(places: list[dict]) -> str:
    """Return "rank 3 on node1", or "ranks 0-2 and 5 on node0 and node1". places: from World.places."""
    numbers = rank_numbers(place["rank"] for place in places)
    return f"rank{'s' * (len(places) > 1)} {numbers} on {host_names(place['host'] for place in places)}"


def rank_numbers(ranks: Iterable[int]) -> str:
    """Return "0-2 and 5" for 0, 1, 2 and 5."""
    stretches = []
    # Consecutive numbers have the same difference from their index.
    for _, pairs in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        stretch = [str(rank) for _, rank in pairs]
        stretches.append("-".join(dict.fromkeys((stretch[0], stretch[-1]))))
    return _listed(stretches)


def host_names(hosts: Iterable[str]) -> str:
    """Return each host once: "node1 and node2", "node1, node2, node3 and 5 more hosts"."""
    found = list(dict.fromkeys(hosts))
    if len(found) > MOST_HOSTS:
        found[MOST_HOSTS - 1 :] = [f"{len(found) - MOST_HOSTS + 1} more hosts"]
    return _listed(found)


def error_text(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    first_line = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {first_line}"


def _listed(words: list[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
