"""Gather facts about each rank within a time limit, and query the facts of all ranks. A rank's facts:

    {"place": which rank on which host, "errors": {section: why it failed}, section: its facts, ...}

A section is gathered by a function that returns data for JSON. Nothing here communicates.
"""

import faulthandler
import os
import socket
import threading
from collections import defaultdict
from statistics import median

from dist.console import say
from scripts.machine.names import error_text, host_names, rank_names

LAST_RESORT_S = 5.0


def new_facts() -> dict:
    """Return the first facts of a process, before it knows other ranks."""
    place = {"rank": 0, "size": 1, "node": 0, "nodes": 1, "local_rank": 0, "local_size": 1}
    return {"place": place | {"host": socket.gethostname()}, "errors": {}}


def gather(facts: dict, sections: dict, limit: "TimeLimit") -> None:
    """Call each section and store its result, or why it failed, in `facts`."""
    for name, section in sections.items():
        limit.stage = f"looking at {name}: find out what hangs there: a file system, a driver, a tool"
        try:
            facts[name] = section()
        except (Exception, SystemExit) as error:  # importing a library may raise even SystemExit
            facts["errors"][name] = error_text(error)


def variables(*names: str) -> dict[str, str]:
    """Return the environment variables among `names` that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


class TimeLimit:
    """Ends this process with code 1 after `seconds`, and prints its current `stage`."""

    def __init__(self, seconds: float):
        self.stage = "starting"
        self._seconds = seconds
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        # A library that is starting may hold the interpreter's lock. Then the timer cannot run, but faulthandler can.
        faulthandler.dump_traceback_later(seconds + LAST_RESORT_S, exit=True)

    def _end(self) -> None:
        process = f"{socket.gethostname()}, process {os.getpid()}"
        say(f"doctor: will fail: {process}: not done after {self._seconds:g} s, while {self.stage}", on_stderr=True)
        os._exit(1)


def fact(facts: dict, path: str):
    """Return the fact at "section/key/..."; None if it is missing."""
    for key in path.split("/"):
        facts = facts.get(key) if isinstance(facts, dict) else None
    return facts


class RankFacts(list):
    """The facts of several ranks, in order of rank."""

    def where(self, path: str, holds=lambda value: True) -> "RankFacts":
        """Return the ranks that know the fact at `path` and whose value satisfies holds(value)."""
        values = ((facts, fact(facts, path)) for facts in self)
        return RankFacts(facts for facts, value in values if value is not None and holds(value))

    def values(self, path: str) -> list:
        """Return the fact at `path` of every rank that knows it."""
        return [fact(facts, path) for facts in self.where(path)]

    def by_value(self, path: str) -> dict[str, "RankFacts"]:
        """Group the ranks by the text of a fact."""
        found = defaultdict(RankFacts)
        for facts in self.where(path):
            found[str(fact(facts, path))].append(facts)
        return found

    def far_from_median(self, path: str, is_far) -> tuple["RankFacts", float]:
        """Return the ranks for which is_far(number, median) is true, and the median; none for fewer than three."""
        numbers = self.values(path)
        usual = median(numbers) if len(numbers) > 2 else 0
        return self.where(path, lambda number: len(numbers) > 2 and is_far(number, usual)), usual

    @property
    def nodes(self) -> list["RankFacts"]:
        """The ranks of each node."""
        return list(self.by_value("place/node").values())

    @property
    def leaders(self) -> "RankFacts":
        """The first rank of each node, for facts that all ranks of a node share."""
        return RankFacts(members[0] for members in self.nodes)

    @property
    def hosts(self) -> str:
        return host_names(self.values("place/host"))

    @property
    def names(self) -> str:
        return rank_names(self.values("place"))
