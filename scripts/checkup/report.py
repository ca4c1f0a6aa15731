"""What doctor.py prints: facts in aligned lines, findings with their fixes, the verdict. Needs nothing but Python."""

import textwrap
from dataclasses import asdict

from scripts.checkup.checks import verdict
from scripts.checkup.findings import Finding, nodes, plural, rank_list

MOST_ROWS = 40
LABEL, INDENT = 14, "  "
SEVERITY, WIDTH = 14, 120


def as_text(ranks: list[dict], findings: list[Finding]) -> str:
    first = ranks[0]
    parts = [
        _section("software", _software(first)),
        _section("launch", _launch(first)),
        _section("this host" if len(nodes(ranks)) == 1 else "rank 0's host", _host(first)),
        "\n".join(table(_node_rows(ranks))),
    ]
    if any(facts.get("link") for facts in ranks):
        parts.append("\n".join(table(_link_rows(ranks))))
    if gpus := _gpu_rows(ranks):
        parts.append("\n".join(table(gpus)))
    parts.append("\n".join(_finding_lines(findings)) or "no findings")
    parts.append(f"verdict: {verdict(findings, first['place'])}")
    return "\n\n".join(parts)


def as_dict(ranks: list[dict], findings: list[Finding]) -> dict:
    """What --json writes."""
    text = verdict(findings, ranks[0]["place"])
    return {"verdict": text, "findings": [asdict(finding) for finding in findings], "ranks": ranks}


def one_line(findings: list[Finding]) -> str:
    """What a copy prints that may be one of many: the first finding."""
    return f"doctor: {findings[0].severity}: {findings[0].text}; {findings[0].fix}"


def _section(title: str, rows: list[tuple[str, str | None]]) -> str:
    label = len(INDENT) + LABEL + 1
    lines = [_wrapped(f"{INDENT}{name:<{LABEL}} ", text, " " * label) for name, text in rows if text]
    return "\n".join([title, *(part for line in lines for part in line)])


def _software(facts) -> list[tuple]:
    software, mpi = facts.get("software", {}), facts.get("MPI", {})
    versions = {name: found for name, found in software.get("versions", {}).items() if found}
    libraries = [
        f"{library['name']} {library['version']}, {plural(library['threads'], 'thread')}, held to {library['held_to']}"
        for library in facts.get("BLAS", [])
    ]
    aware = facts.get("GPU-aware MPI", {})
    return [
        ("versions", ", ".join(f"{name} {found}" for name, found in versions.items())),
        ("interpreter", software.get("interpreter")),
        ("source", software.get("source")),
        ("BLAS", "; ".join(libraries)),
        ("numba's cache", facts.get("numba's cache", {}).get("folder")),
        ("MPI", mpi.get("library") or facts["errors"].get("MPI")),
        ("thread level", mpi.get("thread_level")),
        ("GPU-aware", aware and f"{'yes' if aware['aware'] else 'no'} ({aware['why']})"),
    ]


def _launch(facts) -> list[tuple]:
    launcher, place = facts.get("launcher", {}), facts["place"]
    mpiruns = [f"{run['path']} ({run['family']} {run['version']})" for run in launcher.get("mpiruns", [])]
    return [
        ("ranks", f"{place['size']} on {plural(place['nodes'], 'node')}"),
        ("launcher", launcher.get("kind")),
        ("mpirun", ", ".join(mpiruns) or "not found"),
        ("srun", launcher.get("srun")),
        ("environment", " ".join(f"{name}={text}" for name, text in launcher.get("variables", {}).items())),
    ]


def _host(facts) -> list[tuple]:
    cores, memory = facts.get("cores", {}), facts.get("memory", {})
    limits, folder, tokenizer = (facts.get(name, {}) for name in ("limits", "run folder", "tokenizer"))
    threads, gpu_libraries = cores.get("variables", {}), facts.get("GPUs", {}).get("libraries", {})
    ports = [f"{port['name']} ({_rate(port['rate'])})" for port in facts.get("interfaces", [])]
    return [
        ("processor", facts.get("software", {}).get("processor")),
        ("system", facts.get("software", {}).get("system")),
        ("threads", " ".join(f"{name}={text}" for name, text in threads.items()) or "no variable limits them"),
        ("memory limit", memory and (_size(memory["limit"]) if memory["limit"] else "none of a cgroup")),
        ("CPU quota", cores and (f"{cores['quota']:g} cores" if cores["quota"] else "none of a cgroup")),
        ("ulimit", limits and f"-l {_limit(limits['locked_memory'])}, -n {_limit(limits['open_files'])}"),
        ("interfaces", ", ".join(ports)),
        ("run folder", folder and f"{folder['path']}: {folder['problem'] or _size(folder['free']) + ' free'}"),
        ("gpt2 tokenizer", tokenizer and ("needs the network" if tokenizer["missing"] else tokenizer["folder"])),
        ("GPU driver", facts.get("GPUs", {}).get("driver") or "no GPU found"),
        ("GPU libraries", ", ".join(f"{name} {found}" for name, found in gpu_libraries.items())),
    ]


def _node_rows(ranks) -> list[list[str]]:
    rows = [["node", "host", "ranks", "cores", "a rank's", "threads", "GFLOP/s a rank", "memory free", "/dev/shm free"]]
    for node, members in nodes(ranks).items():
        first = members[0]
        cores = first.get("cores", {})
        rows.append(
            [
                str(node),
                first["place"]["host"],
                rank_list([facts["place"]["rank"] for facts in members]),
                str(cores.get("count", "-")),
                _span([len(facts["cores"]["affinity"]) for facts in members if "cores" in facts]),
                _span([facts["threads"] for facts in members if "threads" in facts]),
                _span([round(facts["speed"] / 1e9) for facts in members if facts.get("speed")]),
                _size(first.get("memory", {}).get("free")),
                _size(first.get("shared memory", {}).get("free")),
            ]
        )
    return rows


def _link_rows(ranks) -> list[list[str]]:
    rows = [["node", "host", "latency", "out", "in", "both", "sent through", "clock error", "time of day"]]
    for node, members in nodes(ranks).items():
        link, clock = members[0].get("link"), members[0].get("clock", {"error_s": 0, "ahead_s": 0})
        if link:
            used = [name for name, count in members[0].get("traffic", {}).items() if count > 1e6]
            rates = [_rate(link[way]) for way in ("out", "in", "both")]
            times = [f"{clock['error_s'] * 1e6:.0f} us", f"{clock['ahead_s']:+.3f} s"]
            latency = f"{link['latency_s'] * 1e6:.0f} us"
            rows.append([str(node), members[0]["place"]["host"], latency, *rates, ", ".join(used) or "-", *times])
    return rows


def _gpu_rows(ranks) -> list[list[str]]:
    """A row for each rank that has a GPU; [] where none has."""
    rows = [["rank", "host", "GPU", "name", "memory free", "CUDA: driver, CuPy", "NCCL", "cuDNN", "links"]]
    topologies = {node: members[0].get("GPUs", {}).get("topology") for node, members in nodes(ranks).items()}
    for facts in ranks:
        own = facts.get("own GPU", {})
        if own.get("id"):
            links = (topologies[facts["place"]["node"]] or {}).get("links", {})
            cuda = f"{own['driver_cuda']}, {own['runtime_cuda']}"
            versions = [cuda, *(str(own[library] or "-") for library in ("nccl", "cudnn"))]
            # Of a rank that is shown its own GPU alone, the number says nothing about the node's.
            own_links = links.get(f"GPU{own['index']}", {}) if own["count"] == len(links) else {}
            between = ", ".join(f"{other} {kind}" for other, kind in own_links.items()) or "-"
            place = [str(facts["place"]["rank"]), facts["place"]["host"], str(own["index"]), own["name"]]
            rows.append([*place, _size(own["free"]), *versions, between])
    return rows if len(rows) > 1 else []


def table(rows: list[list[str]]) -> list[str]:
    """Aligned columns, the header first; of a large job the first rows."""
    shown = rows[: MOST_ROWS + 1]
    widths = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return lines + [f"... and {len(rows) - len(shown)} more: --json has all"] * (len(rows) > len(shown))


def _finding_lines(findings: list[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        lines += _wrapped(f"{finding.severity:<{SEVERITY}}", finding.text, " " * SEVERITY)
        lines += _wrapped(f"{'':<{SEVERITY}}fix: ", finding.fix, " " * (SEVERITY + 5))
    return lines


def _wrapped(label: str, text: str, indent: str) -> list[str]:
    """Broken between words only: what is to be typed or copied stays whole."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=label, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _span(numbers: list) -> str:
    if not numbers:
        return "-"
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"


def _size(amount: int | None) -> str:
    if amount is None:
        return "-"
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.0f} MB"


def _rate(rate: float | None) -> str:
    return "rate unknown" if rate is None else f"{rate * 8 / 1e9:.3g} Gbit/s"


def _limit(amount: int | None) -> str:
    return "unlimited" if amount is None else str(amount)
