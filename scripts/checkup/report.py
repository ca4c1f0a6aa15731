"""What doctor.py prints: facts in aligned lines, findings with their fixes, the verdict. Needs nothing but Python."""

import textwrap
from dataclasses import asdict

from scripts.checkup.findings import FAIL, SLOW, Finding, Ranks, bytes_text, fact, plural

MOST_ROWS = 40
LABEL, SEVERITY, WIDTH = 17, 14, 120


class Known(dict):
    """Facts, where what is missing is empty."""

    def __missing__(self, key):
        return Known()


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
    ranks, first = Ranks(ranks), Known(ranks[0])
    said = []
    for finding in findings:
        said += _wrapped(f"{finding.severity:<{SEVERITY}}", finding.text, SEVERITY)
        said += _wrapped(f"{'':<{SEVERITY}}fix: ", finding.fix, SEVERITY + 5)
    parts = [
        ["software", *_aligned(_software(first))],
        ["launch", *_aligned(_launch(first))],
        ["this host" if len(ranks.nodes) == 1 else "rank 0's host", *_aligned(_host(first))],
        table(_node_rows(ranks)),
        *(table(rows) for rows in (_link_rows(ranks), _gpu_rows(ranks)) if len(rows) > 1),
        said or ["no findings"],
        [f"verdict: {verdict(findings, first['place'])}"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _software(first: Known) -> dict:
    software, aware = first["software"], first["GPU-aware MPI"]
    return {
        "versions": ", ".join(f"{name} {found}" for name, found in software["versions"].items() if found),
        "interpreter": software["interpreter"],
        "source": software["source"],
        "BLAS": "; ".join(
            f"{one['name']} {one['version']}, {plural(one['threads'], 'thread')}, held to {one['held_to']}"
            for one in first["BLAS"]
        ),
        "numba's cache": first["numba's cache"]["folder"],
        "MPI": first["MPI"]["library"] or first["errors"].get("MPI"),
        "thread level": first["MPI"]["thread_level"],
        "GPU-aware": aware and f"{'yes' if aware['aware'] else 'no'} ({aware['why']})",
    }


def _launch(first: Known) -> dict:
    launcher, place = first["launcher"], first["place"]
    mpiruns = [f"{run['path']} ({run['family']} {run['version']})" for run in launcher["mpiruns"]]
    return {
        "ranks": f"{place['size']} on {plural(place['nodes'], 'node')}",
        "launcher": launcher["kind"],
        "mpirun": ", ".join(mpiruns) or "not found",
        "srun": launcher["srun"],
        "environment": _settings(launcher["variables"]),
    }


def _host(first: Known) -> dict:
    cores, memory, gpus = first["cores"], first["memory"], first["GPUs"]
    ulimits = zip(("-l", "-n"), first["limits"].values(), strict=False)  # empty where they are not known
    ports = [f"{port['name']} ({_rate(port['rate'])})" for port in first["interfaces"]]
    folder, tokenizer = first["run folder"], first["tokenizer"]
    return {
        "processor": first["software"]["processor"],
        "system": first["software"]["system"],
        "threads": _settings(Known(cores)["variables"]) or "no variable limits them",
        "memory limit": memory and (bytes_text(memory["limit"]) if memory["limit"] else "none of a cgroup"),
        "CPU quota": cores and (f"{cores['quota']:g} cores" if cores["quota"] else "none of a cgroup"),
        "ulimit": ", ".join(f"{flag} {'unlimited' if limit is None else limit}" for flag, limit in ulimits),
        "interfaces": ", ".join(ports),
        "run folder": folder and f"{folder['path']}: {folder['problem'] or bytes_text(folder['free']) + ' free'}",
        "gpt2 tokenizer": tokenizer and ("needs the network" if tokenizer["missing"] else tokenizer["folder"]),
        "GPU driver": gpus["driver"] or "no GPU found",
        "GPU libraries": ", ".join(f"{name} {found}" for name, found in gpus["libraries"].items()),
    }


def _settings(variables: dict) -> str:
    return " ".join(f"{name}={text}" for name, text in variables.items())


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


def _aligned(rows: dict) -> list[str]:
    return [line for name, text in rows.items() if text for line in _wrapped(f"  {name:<{LABEL - 2}}", text, LABEL)]


def _wrapped(label: str, text: str, indent: int) -> list[str]:
    """Broken between words only: what is to be typed or copied stays whole."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=" " * indent, **options)


def _span(values: list, form=str) -> str:
    """ "4", "2-4"; "-" where nothing is known."""
    return "-".join(dict.fromkeys((form(min(values)), form(max(values))))) if values else "-"


def _rate(rate: float | None) -> str:
    return "rate unknown" if rate is None else f"{rate * 8 / 1e9:.3g} Gbit/s"
