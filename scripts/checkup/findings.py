"""Findings, and how checks ask for the facts of all ranks.

A check is a generator, check(ranks, model): of the Ranks of a job, and the name of the model that is asked for (or
None), it yields Findings. It looks at facts alone, so invented ones test it. Checks pass over facts that are missing.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from scripts.checkup.facts import error_text

FAIL, SLOW, NOTE = SEVERITIES = "will fail", "will be slow", "note"
MOST_HOSTS = 4  # that a sentence names


@dataclass(frozen=True)
class Finding:
    """severity: one of SEVERITIES; about: one or two words; text: what was found and where; fix: what to do."""

    severity: str
    about: str
    text: str
    fix: str


class Ranks(list):
    """The facts of some ranks, in their order; facts.py says what they are."""

    def where(self, path: str, holds=lambda value: True) -> "Ranks":
        """The ranks that know the fact at "section/key/...", and whose value `holds`."""
        values = ((facts, fact(facts, path)) for facts in self)
        return Ranks(facts for facts, value in values if value is not None and holds(value))

    def values(self, path: str) -> list:
        """The fact at "section/key/..." of every rank that knows it."""
        return [fact(facts, path) for facts in self.where(path)]

    def holders(self, path: str) -> dict[str, "Ranks"]:
        """For each value of a fact, as text, the ranks that have it."""
        found = defaultdict(Ranks)
        for facts in self.where(path):
            found[str(fact(facts, path))].append(facts)
        return found

    def difference(self, path: str) -> str | None:
        """ "1.2 on node0; 1.3 on node1 and node2" where the ranks' values differ; None where they do not."""
        holders = self.holders(path)
        return "; ".join(f"{value} on {some.hosts}" for value, some in holders.items()) if len(holders) > 1 else None

    def far_from_median(self, path: str, is_far) -> tuple["Ranks", float]:
        """The ranks where is_far(number, median), and the median; of two nobody can say which is odd."""
        numbers = self.values(path)
        usual = median(numbers) if len(numbers) > 2 else 0
        return self.where(path, lambda number: len(numbers) > 2 and is_far(number, usual)), usual

    @property
    def nodes(self) -> list["Ranks"]:
        """The ranks of each node."""
        return list(self.holders("place/node").values())

    @property
    def leaders(self) -> "Ranks":
        """The first rank of each node: for what is the same for all ranks of a node."""
        return Ranks(members[0] for members in self.nodes)

    @property
    def hosts(self) -> str:
        """ "node1", "node1 and node2", "node1, node2, node3 and 5 more hosts"."""
        hosts = list(self.holders("place/host"))
        if len(hosts) > MOST_HOSTS:
            hosts[MOST_HOSTS - 1 :] = [f"{len(hosts) - MOST_HOSTS + 1} more hosts"]
        return listed(hosts)

    @property
    def numbers(self) -> str:
        """ "0-2 and 5" of the ranks 0, 1, 2, 5."""
        parts = []
        # Numbers that follow each other have the same distance to their index.
        for _, pairs in groupby(enumerate(sorted(self.values("place/rank"))), lambda pair: pair[1] - pair[0]):
            run = [str(number) for _, number in pairs]
            parts.append("-".join(dict.fromkeys((run[0], run[-1]))))
        return listed(parts)

    @property
    def names(self) -> str:
        """ "rank 3 on node1", "ranks 0-2 and 5 on node0 and node1"."""
        return f"rank{'s' * (len(self) > 1)} {self.numbers} on {self.hosts}"


def fact(facts: dict, path: str):
    """The one at "section/key/..."; None where something on the way is missing."""
    for key in path.split("/"):
        facts = facts.get(key) if isinstance(facts, dict) else None
    return facts


def find(checks, ranks: list[dict], model: str | None = None) -> list[Finding]:
    """What the checks find, what fails first; a check that meets facts it does not understand is a finding itself."""
    found = []
    for check in checks:
        try:
            found += check(Ranks(ranks), model)
        except Exception as error:  # a doctor that falls over helps nobody
            text = f"the check {check.__name__} ended with {error_text(error)}"
            found.append(Finding(NOTE, "doctor", text, "report it, with what --json writes"))
            if isinstance(error, ImportError):  # training imports the same
                found[-1] = Finding(FAIL, "doctor", text, "mend that, and start it again")
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def listed(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def bytes_text(amount: float) -> str:
    """ "27 MB", "1.2 GB", "340 kB". That of traces needs NumPy, which may be what is missing."""
    unit, size = next((pair for pair in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if amount >= pair[1]), ("bytes", 1))
    return f"{amount / size:.3g} {unit}" if amount < 1000 * size else f"{amount / size:.0f} {unit}"
