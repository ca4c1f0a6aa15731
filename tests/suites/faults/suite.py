"""What fault_suite.py and failure_suite.py share: their flags, and the file of rows that they write for the docs."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def suite_parser(description: str, runs: str, cases: dict, others: dict | None = None) -> argparse.ArgumentParser:
    """A parser that knows --out, --cases and --json.

    runs: where in DIR a run goes. cases: those that run by default, by name; others: those that run only when named.
    """
    known, by_name = cases | (others or {}), f"; by name alone {', '.join(others)}" if others else ""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help=f"the runs go to {runs}")
    add("--cases", type=names_in(known), default=list(cases), help=f"of {', '.join(cases)} (all){by_name}")
    add("--json", type=Path, metavar="FILE", help="put the rows into this file")
    return parser


def names_in(table: dict) -> Callable[[str], list[str]]:
    """An argparse type: the names in a text with commas, each of them in `table`."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in table]:
            raise argparse.ArgumentTypeError(f"no case {unknown[0]}, there are {', '.join(table)}")
        return found

    return names


def take_fault(faults: dict, form: str) -> list[str]:
    """The first argument of the command line, taken off it: the name of one of `faults`, and words behind colons.

    form: "FAULT:R:S", which the argument must have; words in [] may be left out. Ends the program where it does not.
    --help alone prints the program's docstring instead.
    """
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(sys.modules["__main__"].__doc__)
        raise SystemExit(0)
    ranks = r"[0-9]+|all" if ":S" in form else r"[0-9]+"
    words = sys.argv.pop(1).split(":") if len(sys.argv) > 1 else [""]
    most, least = form.count(":") + 1, form.partition("[")[0].count(":") + 1
    problem = None if words[0] in faults else f"no fault {words[0] or 'given'}, there are {', '.join(faults)}"
    if not least <= len(words) <= most or not all(re.fullmatch(ranks, word) for word in words[1:]):
        problem = problem or f"{':'.join(words)}: expected {form}, R and S being numbers"
    if problem:
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    return words


class RowsFile:
    """{"made_on": {where: machine and versions}, "summary": a sentence, "rows": [...]}, a row for each run.

    A row names its case, and in the field `key` what tells the runs of a case apart. A new row replaces the one of the
    same case and key; all others stay, as they may have been made with another MPI library. Rows are in the order of
    `cases`. `summarize(rows)` gives the sentence.
    """

    def __init__(self, path: Path | None, key: str, cases: Iterable[str], summarize: Callable[[list[dict]], str]):
        self._path, self._key, self._order, self._summarize = path, key, list(cases), summarize

    def put(self, row: dict, where: str, made_on: dict) -> None:
        """Where there is no path nothing is written."""
        if self._path is None:
            return
        found = json.loads(self._path.read_text()) if self._path.exists() else {"made_on": {}, "rows": []}
        rows = {self._place(one): one for one in [*found["rows"], row] if one["case"] in self._order}
        rows = [rows[place] for place in sorted(rows)]
        stays = any(one is not row and one.get(self._key) == row[self._key] for one in rows)
        made_on = joined(found["made_on"].get(where, {}), made_on) if stays else made_on
        content = {"made_on": found["made_on"] | {where: made_on}, "summary": self._summarize(rows), "rows": rows}
        self._path.write_text(json.dumps(content, indent=1) + "\n")

    def _place(self, row: dict) -> tuple:
        return self._order.index(row["case"]), row[self._key]


def joined(earlier: dict, now: dict) -> dict:
    """Machine and versions of rows that were made on both: "AMD EPYC and Intel Xeon"."""
    return {
        name: earlier[name] if str(value) in str(earlier.get(name, "")) else f"{earlier[name]} and {value}"
        for name, value in (earlier | now).items()
        if name in earlier
    } | {name: value for name, value in now.items() if name not in earlier}
