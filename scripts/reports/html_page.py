"""Write RUN/report.html: the verdict, pictures, tables and settings of a run in one self-contained file."""

import base64
from html import escape
from pathlib import Path

from gpt2.files import replacing
from scripts.reports.verdict import evidence_rows, place_text
from traces.units import count_text, mfu_text, short_ms

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.15rem; color: #767676; font-weight: 600; margin: 0 }
.verdict { font-size: 1.45rem; line-height: 1.35; font-weight: 650; margin: .4rem 0 1.2rem }
.where { color: #555 }
.speed { display: flex; flex-wrap: wrap; gap: .4rem 3rem; margin: 1.2rem 0 }
.speed div { display: flex; flex-direction: column-reverse } .speed dt { color: #555; font-size: .9rem }
.speed dd { margin: 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums }
.uncertain { border-left: 4px solid #E69F00; padding-left: .8rem; color: #555 }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid #ddd }
figure { margin: 1rem 0 } figure img { max-width: 100%; max-height: 40rem } figcaption { color: #555; font-size: .9rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; margin: .6rem 0 }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid #eee; vertical-align: top }
th:first-child, td:first-child { text-align: left } th { color: #555; font-weight: 600 }
.settings td { text-align: left; word-break: break-word } .settings td:first-child { white-space: nowrap }
@media print { body { max-width: none } h2 { break-after: avoid } figure { break-inside: avoid } }
"""
# Captions, in the order of the report. They explain a picture; the verdict says what it means for the run.
CAPTIONS = {
    "timeline": "Three steps, with the median one among them, a row per rank. Hatched: waiting for other ranks. Below: "
    "bytes per second through each node's port, in and out; dashed: the probed rate. With pipeline stages: one step, "
    "the stages below each other; numbers are microbatches, white means waiting for another stage.",
    "phases": "The median step, cut into its phases.",
    "ports": "Bytes through each node's port in a step. Dashed: the most that the port carries in that time. Diamonds: "
    "the sum of the strategy's messages.",
    "ranks": "Each rank's computing and waiting, step by step; brighter is longer.",
    "waits": "Each rank's median step: computing, copying data, and each kind of waiting.",
    "messages": "Bytes between ranks and between nodes in one exchange, from the strategy's schedule.",
    "loss": "Training and validation loss.",
    "whole-run": "The whole run, step by step: pale is each step, dark the running mean. Dashed lines: resumes. "
    "Crosses: updates that --skip-outliers skipped. Memory: of the rank with the most.",
}


def write_report(
    path: Path, numbers: dict, answer: dict, figures: dict[str, Path], config: dict, first: tuple[str, ...] = ()
) -> Path:
    """Write the page and return its path. Raise UserError if it cannot be written.

    numbers: from traces.verdict.summary. answer: the object that diagnose.py --json prints. figures: SVG files by name.
    config: from config.json. first: names of the figures that show the verdict.
    """
    title = f"{numbers['label']}, {count_text(numbers['ranks'], 'rank')} on {count_text(numbers['nodes'], 'node')}"
    title += f", {code}" if (code := _code(config)) else ""
    parts = [_verdict(title, answer), _speed(numbers, config), _pictures(figures, first)]
    parts += [f"<h2>Evidence</h2>{_table([], evidence_rows(answer), 'settings')}"]
    parts += [_ranks(answer["evidence"]), _settings(config)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    with replacing(path) as file:
        page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
        file.write(page.encode())
    return path


def _verdict(title: str, answer: dict) -> str:
    sentence = answer["verdict"]
    thin = "".join(f"<li>{escape(text)}</li>" for text in answer["evidence"]["thin"])
    uncertain = f'<div class="uncertain">Less certain, because<ul>{thin}</ul></div>' if thin else ""
    also = [one["sentence"] for one in answer["evidence"]["also"][:3]]
    more = f'<p class="next">After that: {escape("; ".join(also))}.</p>' if also else ""
    return (
        f'<h1>{escape(title)}</h1><p class="verdict">{escape(sentence[:1].upper() + sentence[1:])}.</p>'
        f'<p class="where">{escape(place_text(answer["bottleneck"]))}</p>{more}{uncertain}'
    )


def _speed(numbers: dict, config: dict) -> str:
    """Show milliseconds, tokens per second and MFU in large type, each only if known."""
    shown = {f"a step (median of {numbers['steps']})": f"{short_ms(numbers['step_ms'])} ms"}
    if numbers["tokens_per_s"] is not None:
        shown["tokens a second"] = f"{numbers['tokens_per_s']:,.0f}"
    if numbers["mfu"] is not None:
        peak = _peak(config) or "a peak that config.json lacks"
        of = f"what the fastest step reached, more than {peak}" if numbers["peak_underestimated"] else peak
        shown[f"MFU, of {of}"] = mfu_text(numbers["mfu"], numbers["peak_underestimated"])
    cells = [f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in shown.items()]
    return f'<dl class="speed">{"".join(cells)}</dl>'


def _code(config: dict) -> str:
    """Name the code that ran: "commit 0123456789 with changes", the version without a checkout, "" if unknown."""
    code = config.get("code") or {}
    if not code.get("commit"):
        return f"version {code['version']}" if code.get("version") else ""
    state = {True: " with changes", False: "", None: ", changes unknown"}[code.get("dirty")]
    return f"commit {code['commit'][:10]}{state}"


def _peak(config: dict) -> str:
    """Return the rate of 100% MFU, like "0.125 TFLOP/s (measured)", or why it is unknown, or ""."""
    peak = config.get("peak") or {}
    if not peak.get("tflops"):
        return peak.get("source", "")
    return f"{sum(filter(None, peak['tflops'])):.3g} TFLOP/s ({peak['source']})"


def _pictures(figures: dict[str, Path], first: tuple[str, ...]) -> str:
    shown = []
    for name in sorted((*CAPTIONS, *(figures.keys() - CAPTIONS)), key=lambda name: name not in first):
        if name in figures:
            data = base64.b64encode(figures[name].read_bytes()).decode()
            caption = escape(CAPTIONS.get(name, ""))
            image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
            shown.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return f"<h2>Pictures</h2>{''.join(shown)}"


def _ranks(evidence: dict) -> str:
    waited = evidence["waited_for_s"]
    rows = []
    for row in evidence["ranks"]:
        compute = row["compute_s"]
        spread = f"{short_ms(compute['low'] * 1e3)} to {short_ms(compute['high'] * 1e3)}"
        rank = f"{row['rank']} · {row['place']}" if "place" in row else row["rank"]
        cells = [rank, row["node"], short_ms(compute["median"] * 1e3), spread]
        cells += [short_ms(row["data_s"]["median"] * 1e3), short_ms(waited.get(str(row["rank"]), 0.0) * 1e3)]
        rows.append(cells)
    head = ["rank", "node", "forward + backward, ms", "middle half of steps", "data, ms"]
    head += ["others together waited for it, ms"]
    return f"<h2>Ranks</h2>{_table(head, rows)}"


def _settings(config: dict) -> str:
    rows = [[name.replace("_", "-"), "-" if value is None else value] for name, value in config["settings"].items()]
    facts = {"command": " ".join(config.get("command", [])), "started": config.get("started")}
    facts |= {"MPI": (config.get("mpi_library") or "").strip().split("\n")[0], "parameters": config.get("parameters")}
    facts |= {"peak": _peak(config), "code": _code(config)}
    facts |= config.get("versions") or {}
    rows = [[name, value] for name, value in facts.items() if value] + rows
    return f"<h2>Settings</h2>{_table([], rows, 'settings')}"


def _table(head: list, rows: list, kind: str = "") -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    top = line(head, "th") if head else ""
    return f'<table class="{kind}">{top}{"".join(line(row, "td") for row in rows)}</table>'
