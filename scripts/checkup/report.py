"""What doctor.py prints: facts in aligned lines, findings with their fixes, the verdict. Needs nothing but Python."""

import textwrap
from dataclasses import asdict

from scripts.checkup.findings import FAIL, SLOW, Finding, Ranks, bytes_text, fact, plural

MOST_ROWS = 40
LABEL, SEVERITY, WIDTH = 17, 14, 120
# What is printed of rank 0 beside the tables: the line's label, and where the fact is.
LINES = {
    "versions": "software/versions", "interpreter": "software/interpreter", "MPI": "MPI/library", "BLAS": "BLAS/text",
    "launcher": "launcher/kind", "mpirun": "launcher/mpiruns", "environment": "cores/variables",
    "run folder in": "run folder/place", "GPU driver": "GPUs/driver",
}  # fmt: skip


def verdict(findings: list[Finding], place: dict) -> str:
    """Return one sentence; place: any rank's."""
    job = f"{plural(place['size'], 'rank')} on {plural(place['nodes'], 'node')}"
    for severity, words in ((FAIL, "training will fail"), (SLOW, "training will run, but slower than it could")):
        if subjects := dict.fromkeys(finding.about for finding in findings if finding.severity == severity):
            return f"{job}: {words}: {', '.join(subjects)}"
    unsure = ", but not every check could be made" if any(finding.about == "doctor" for finding in findings) else ""
    return f"{job}: nothing found that would fail or be slow{unsure}"


def as_dict(ranks: list[dict], findings: list[Finding]) -> dict:
    """Return what --json writes."""
    text = verdict(findings, ranks[0]["place"])
    return {"verdict": text, "findings": [asdict(finding) for finding in findings], "ranks": ranks}


def as_text(ranks: list[dict], findings: list[Finding]) -> str:
    ranks = Ranks(ranks)
    place = ranks[0]["place"]
    lines = [f"rank 0, on {place['host']}"]
    for label, path in LINES.items():
        if value := fact(ranks[0], path):
            lines += _wrapped(f"  {label:<{LABEL - 2}}", _text(value), LABEL)
    said = []
    for finding in findings:
        said += _wrapped(f"{finding.severity:<{SEVERITY}}", finding.text, SEVERITY)
        said += _wrapped(f"{'':<{SEVERITY}}fix: ", finding.fix, SEVERITY + 5)
    tables = [rows for rows in (_node_rows(ranks), _link_rows(ranks), _gpu_rows(ranks)) if len(rows) > 1]
    parts = [lines, *map(table, tables), said or ["no findings"], [f"verdict: {verdict(findings, place)}"]]
    return "\n\n".join("\n".join(part) for part in parts)


def _text(value) -> str:
    """Return words as they are, and of a dict "name=value" of what it knows."""
    if isinstance(value, dict):
        return " ".join(f"{name}={known}" for name, known in value.items() if known is not None)
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)


def _node_rows(ranks: Ranks) -> list[list[str]]:
    rows = [["node", "host", "ranks", "cores", "a rank's", "threads", "GFLOP/s a rank", "memory free", "/dev/shm free"]]
    for members in ranks.nodes:
        cores, own = members.values("cores/count"), [len(affinity) for affinity in members.values("cores/affinity")]
        speeds = [round(speed / 1e9) for speed in members.values("speed")]
        numbers = map(_span, (cores, own, members.values("threads"), speeds))
        free = (_span(members.values(path)[:1], bytes_text) for path in ("memory/free", "shared memory/free"))
        rows.append([*_place(members[0], "node"), members.numbers, *numbers, *free])
    return rows


def _link_rows(ranks: Ranks) -> list[list[str]]:
    rows = [["node", "host", "latency", "out", "in", "both", "sent through", "clock error", "time of day"]]
    for facts in ranks.leaders.where("link"):
        link, clock = facts["link"], facts.get("clock", {"error_s": 0, "ahead_s": 0})
        used = ", ".join(name for name, count in facts.get("traffic", {}).items() if count > 1e6) or "-"
        latency, error = (f"{seconds * 1e6:.0f} us" for seconds in (link["latency_s"], clock["error_s"]))
        rates = [f"{link[way] * 8 / 1e9:.3g} Gbit/s" for way in ("out", "in", "both")]
        rows.append([*_place(facts, "node"), latency, *rates, used, error, f"{clock['ahead_s']:+.3f} s"])
    return rows


def _gpu_rows(ranks: Ranks) -> list[list[str]]:
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
    """Align columns, the header first; of a large job the first rows."""
    shown = rows[: MOST_ROWS + 1]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return lines + [f"... and {len(rows) - len(shown)} more: --json has all"] * (len(rows) > len(shown))


def _wrapped(label: str, text: str, indent: int) -> list[str]:
    """Break between words only: what is to be typed or copied stays whole."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=" " * indent, **options)


def _span(values: list, form=str) -> str:
    """Return "4", "2-4", or "-" where nothing is known."""
    return "-".join(dict.fromkeys((form(min(values)), form(max(values))))) if values else "-"
