"""What doctor.py prints: facts in aligned lines, findings with their fixes, the verdict. Needs nothing but Python."""

import textwrap
from dataclasses import asdict

from scripts.checkup.findings import FAIL, SLOW, Finding, Ranks, bytes_text, fact, plural

MOST_ROWS = 40
LABEL, SEVERITY, WIDTH = 17, 14, 120
# What is printed of rank 0 beside the tables: the line's label, and where the fact is.
LINES = {
    "versions": "software/versions", "interpreter": "software/interpreter", "source": "software/source",
    "BLAS": "BLAS", "BLAS kernels": "BLAS kernels/text", "numba's cache": "numba's cache/folder",
    "MPI": "MPI/library", "thread level": "MPI/thread_level", "GPU-aware": "GPU-aware MPI",
    "launcher": "launcher/kind", "mpirun": "launcher/mpiruns", "srun": "launcher/srun",
    "environment": "launcher/variables", "processor": "software/processor", "system": "software/system",
    "threads": "cores/variables", "memory limit": "memory/limit", "CPU quota": "cores/quota", "ulimit": "limits",
    "run folder in": "run folder/place", "free there": "run folder/free", "tiktoken cache": "tokenizer/folder",
    "GPU driver": "GPUs/driver", "GPU libraries": "GPUs/libraries",
}  # fmt: skip
IN_BYTES = ("memory/limit", "run folder/free")


def verdict(findings: list[Finding], place: dict) -> str:
    """One sentence; place: any rank's."""
    job = f"{plural(place['size'], 'rank')} on {plural(place['nodes'], 'node')}"
    for severity, words in ((FAIL, "training will fail"), (SLOW, "training will run, but slower than it could")):
        if subjects := dict.fromkeys(finding.about for finding in findings if finding.severity == severity):
            return f"{job}: {words}: {', '.join(subjects)}"
    unsure = ", but not every check could be made" if any(finding.about == "doctor" for finding in findings) else ""
    return f"{job}: nothing found that would fail or be slow{unsure}"


def as_dict(ranks: list[dict], findings: list[Finding]) -> dict:
    """What --json writes."""
    text = verdict(findings, ranks[0]["place"])
    return {"verdict": text, "findings": [asdict(finding) for finding in findings], "ranks": ranks}


def as_text(ranks: list[dict], findings: list[Finding]) -> str:
    ranks = Ranks(ranks)
    place = ranks[0]["place"]
    known = [_wrapped(f"  {label:<{LABEL - 2}}", _text(value), LABEL) for label, value in _of_first(ranks) if value]
    said = []
    for finding in findings:
        said += _wrapped(f"{finding.severity:<{SEVERITY}}", finding.text, SEVERITY)
        said += _wrapped(f"{'':<{SEVERITY}}fix: ", finding.fix, SEVERITY + 5)
    parts = [
        [f"rank 0, on {place['host']}", *(line for lines in known for line in lines)],
        table(_node_rows(ranks)),
        *(table(rows) for rows in (_link_rows(ranks), _gpu_rows(ranks)) if len(rows) > 1),
        said or ["no findings"],
        [f"verdict: {verdict(findings, place)}"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _of_first(ranks: Ranks):
    """Label and value of each line about rank 0."""
    first = ranks[0]
    yield "ranks", f"{first['place']['size']} on {plural(first['place']['nodes'], 'node')}"
    for label, path in LINES.items():
        value = fact(first, path)
        yield label, bytes_text(value) if value and path in IN_BYTES else value
    yield "interfaces", [f"{port['name']} ({_rate(port['rate'])})" for port in first.get("interfaces", [])]


def _text(value) -> str:
    """Words as they are; "name=value" of what a dict knows."""
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
        rates = [_rate(link[way]) for way in ("out", "in", "both")]
        rows.append([*_place(facts, "node"), latency, *rates, used, error, f"{clock['ahead_s']:+.3f} s"])
    return rows


def _gpu_rows(ranks: Ranks) -> list[list[str]]:
    rows = [["rank", "host", "GPU", "name", "memory free", "CUDA: driver, CuPy", "NCCL", "cuDNN", "links"]]
    for members in ranks.nodes:
        links = fact(members[0], "GPUs/topology/links") or {}
        for facts in members.where("own GPU/id"):
            own = facts["own GPU"]
            # Of a rank that is shown its own GPU alone, the number says nothing about the node's.
            linked = links.get(f"GPU{own['index']}", {}) if own["count"] == len(links) else {}
            between = ", ".join(f"{other} {kind}" for other, kind in linked.items()) or "-"
            versions = [f"{own['driver_cuda']}, {own['runtime_cuda']}", own["nccl"] or "-", own["cudnn"] or "-"]
            cells = [own["index"], own["name"], bytes_text(own["free"]), *versions, between]
            rows.append([*_place(facts, "rank"), *map(str, cells)])
    return rows


def _place(facts: dict, number: str) -> list[str]:
    return [str(facts["place"][number]), facts["place"]["host"]]


def table(rows: list[list[str]]) -> list[str]:
    """Aligned columns, the header first; of a large job the first rows."""
    shown = rows[: MOST_ROWS + 1]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return lines + [f"... and {len(rows) - len(shown)} more: --json has all"] * (len(rows) > len(shown))


def _wrapped(label: str, text: str, indent: int) -> list[str]:
    """Broken between words only: what is to be typed or copied stays whole."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=" " * indent, **options)


def _span(values: list, form=str) -> str:
    """ "4", "2-4"; "-" where nothing is known."""
    return "-".join(dict.fromkeys((form(min(values)), form(max(values))))) if values else "-"


def _rate(rate: float | None) -> str:
    return "rate unknown" if rate is None else f"{rate * 8 / 1e9:.3g} Gbit/s"
