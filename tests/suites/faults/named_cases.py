"""--cases of the scripts that do things to runs: some of a table's names, with commas."""

import argparse
from collections.abc import Callable


def cases_of(table: dict) -> Callable[[str], list[str]]:
    """An argparse type: the names in a text, each of them in `table`."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in table]:
            raise argparse.ArgumentTypeError(f"no case {unknown[0]}, there are {', '.join(table)}")
        return found

    return names
