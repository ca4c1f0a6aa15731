"""The problems that checks find, and the text that doctor.py prints. Needs the standard library only.

A check is a generator, check(ranks, model), that yields Problems. ranks: the RankFacts of the job. model: the name of
the requested model, or None. A check reads nothing but facts, so tests can invent them. It skips missing facts.
"""

import textwrap
from dataclasses import dataclass

from scripts.checkup.facts import RankFacts, fact
from scripts.machine.names import error_text, rank_numbers

FAIL = "will fail"
SLOW = "will be slow"
NOTE = "note"
SEVERITIES = (FAIL, SLOW, NOTE)
MOST_ROWS = 40
LABEL = 17
SEVERITY = 14
WIDTH = 120
# Facts of rank 0 that are printed beside the tables: {label: path}.
LINES = {
    "versions": "software/versions", "interpreter": "software/interpreter", "MPI": "MPI/library", "BLAS": "BLAS/text",
    "mpirun": "launcher/mpiruns", "environment": "cores/variables", "run folder in": "run folder/place",
    "GPU driver": "GPUs/driver",
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """severity: one of SEVERITIES; about: the subject, one or two words; text: fault and place; fix: the remedy."""

    severity: str
    about: str
    text: str
    fix: str


def find_problems(checks, ranks: list[dict], model: str | None = None) -> list[Problem]:
    """Run the checks and return their problems, failures first. A check that raises is reported as a problem itself."""
    found = []
    for check in checks:
        try:
            found += check(RankFacts(ranks), model)
        except ImportError:  # NumPy, for example: the section "packages" reports it
            continue
        except Exception as error:
            text = f"the check {check.__name__} ended with {error_text(error)}"
            found.append(Problem(NOTE, "doctor", text, "report it, with what --json writes"))
    return sorted(found, key=lambda problem: SEVERITIES.index(problem.severity))


def verdict(problems: list[Problem], place: dict) -> str:
    """Return the verdict in one sentence. place: the place of any rank."""
    job = f"{plural(place['size'], 'rank')} on {plural(place['nodes'], 'node')}"
    for severity, words in ((FAIL, "training will fail"), (SLOW, "training will run, but slower than it could")):
        if subjects := dict.fromkeys(problem.about for problem in problems if problem.severity == severity):
            return f"{job}: {words}: {', '.join(subjects)}"
    unsure = ", but not every check could be made" if any(problem.about == "doctor" for problem in problems) else ""
    return f"{job}: nothing found that would fail or be slow{unsure}"


def as_text(ranks: list[dict], problems: list[Problem]) -> str:
    """Return the text that doctor.py prints."""
    ranks = RankFacts(ranks)
    first = ranks[0]
    lines = [f"rank 0, on {first['place']['host']}"]
    for label, path in LINES.items():
        if value := fact(first, path):
            lines += _wrapped(f"  {label:<{LABEL - 2}}", _value_text(value), LABEL)
    found = []
    for problem in problems:
        found += _wrapped(f"{problem.severity:<{SEVERITY}}", problem.text, SEVERITY)
        found += _wrapped(f"{'':<{SEVERITY}}fix: ", problem.fix, SEVERITY + 5)
    tables = [table(rows) for rows in (_node_rows(ranks), _link_rows(ranks), _gpu_rows(ranks)) if len(rows) > 1]
    parts = [lines, *tables, found or ["no findings"], [f"verdict: {verdict(problems, first['place'])}"]]
    return "\n\n".join("\n".join(part) for part in parts)


def _value_text(value) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={known}" for name, known in value.items() if known is not None)
    return ", ".join(map(_value_text, value)) if isinstance(value, list) else str(value)


def _node_rows(ranks: RankFacts) -> list[list[str]]:
    rows = [["node", "host", "ranks", "cores", "per rank", "threads", "GFLOP/s a rank", "memory free", "/dev/shm free"]]
    for members in ranks.nodes:
        own = [len(affinity) for affinity in members.values("cores/affinity")]
        speeds = [round(speed / 1e9) for speed in members.values("speed")]
        numbers = map(_span, (members.values("cores/count"), own, members.values("threads"), speeds))
        free = (_span(members.values(path)[:1], bytes_text) for path in ("memory/free", "shared memory/free"))
        rows.append([*_place(members[0], "node"), rank_numbers(members.values("place/rank")), *numbers, *free])
    return rows


def _link_rows(ranks: RankFacts) -> list[list[str]]:
    rows = [["node", "host", "latency", "out", "in", "both", "sent through"]]
    for facts in ranks.leaders.where("link"):
        link = facts["link"]
        used = ", ".join(name for name, count in facts.get("traffic", {}).items() if count > 1e6) or "-"
        rates = [f"{link[way] * 8 / 1e9:.3g} Gbit/s" for way in ("out", "in", "both")]
        rows.append([*_place(facts, "node"), f"{link['latency_s'] * 1e6:.0f} us", *rates, used])
    return rows


def _gpu_rows(ranks: RankFacts) -> list[list[str]]:
    rows = [["rank", "host", "GPU", "name", "memory free", "CUDA: driver, CuPy", "cuDNN"]]
    for facts in ranks.where("own GPU/id"):
        own = facts["own GPU"]
        versions = f"{own['driver_cuda']}, {own['runtime_cuda']}"
        cells = [str(own["index"]), own["name"], bytes_text(own["free"]), versions, str(own["cudnn"] or "-")]
        rows.append([*_place(facts, "rank"), *cells])
    return rows


def _place(facts: dict, number: str) -> list[str]:
    return [str(facts["place"][number]), facts["place"]["host"]]


def table(rows: list[list[str]]) -> list[str]:
    """Align the columns of a header and its rows. Keep only the first MOST_ROWS rows."""
    shown = rows[: MOST_ROWS + 1]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in shown]
    return lines + [f"... and {len(rows) - len(shown)} more: --json has all"] * (len(rows) > len(shown))


def _wrapped(label: str, text: str, indent: int) -> list[str]:
    """Break lines between words only, so that paths and commands can be copied."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=" " * indent, **options)


def _span(values: list, form=str) -> str:
    """Return "4", "2-4", or "-" if there are no values."""
    return "-".join(dict.fromkeys((form(min(values)), form(max(values))))) if values else "-"


def plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def bytes_text(amount: float) -> str:
    """Return "27 MB", "1.2 GB", "340 kB". (bytes_text in traces.units needs NumPy, which may be missing.)"""
    unit, size = next((pair for pair in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if amount >= pair[1]), ("bytes", 1))
    return f"{amount / size:.3g} {unit}" if amount < 1000 * size else f"{amount / size:.0f} {unit}"
