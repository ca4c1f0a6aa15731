"""Export to Chrome's trace event JSON for Perfetto (ui.perfetto.dev); gzipped if the name ends in .gz.

A process is a node, a thread a rank, both counted from 1 (0 is the operating system's idle process there). Slices nest
as step > phase > wait, transfer. Ranks that share models are named after and sorted by their replica, stage and
shard. Each node has a counter of its ports' MB/s. Times are microseconds from the run's start, with three decimals.

Format: "Trace Event Format" (Chromium), and Perfetto's source, importers/json.
"""

import json
from pathlib import Path

import numpy as np

from traces.export.line_merge import Lines, text_file, write_merged
from traces.export.spans import RankSpans, lay_out
from traces.read.runs import Run
from traces.record.phases import COMPUTE, COPY, EXCHANGE, NAMES, PHASES, PIPELINE

# The order of simultaneous events: the outer slice comes first.
STEP, PHASE, WAIT, TRANSFER, RATE = range(5)
MOVES = (*EXCHANGE, *PIPELINE, *COPY)
CATEGORY_OF = dict.fromkeys(COMPUTE, "compute") | dict.fromkeys(EXCHANGE, "exchange") | dict.fromkeys(COPY, "copy")
CATEGORY_OF |= dict.fromkeys(PIPELINE, "pipeline")


def export(run: Run, path) -> list[Path]:
    """Write the file, and return [path]."""
    path = Path(path)
    spans = lay_out(run)
    sources = [lines for rank in spans.ranks for lines in _slices(rank)]
    sources += [_counter(node, rates) for node, (_, rates) in spans.counted.items()]
    facts = {"run": str(run.path), "strategy": run.label, "clock_error_ns": run.clock_error_ns}
    with text_file(path) as file:
        file.write('{"otherData":' + json.dumps(facts) + ',"traceEvents":[\n')
        file.write(",\n".join(json.dumps(event) for event in _names([rank.place for rank in spans.ranks])))
        write_merged(file, sources)
        file.write("\n]}\n")
    return [path]


def _names(places: list[dict]) -> list[dict]:
    """Return the events that name and sort nodes and ranks."""
    events = []
    hosts = {place["node"]: place["host"] for place in places}
    for node, host in hosts.items():
        about = {"ph": "M", "pid": node + 1}
        events.append(about | {"name": "process_name", "args": {"name": f"node {node} {host}"}})
        events.append(about | {"name": "process_sort_index", "args": {"sort_index": node}})
    for place in places:
        about = {"ph": "M", "pid": place["node"] + 1, "tid": place["rank"] + 1}
        events.append(about | {"name": "thread_name", "args": {"name": place["title"]}})
        events.append(about | {"name": "thread_sort_index", "args": {"sort_index": place["row"]}})
    return events


def _slices(rank: RankSpans) -> list[Lines]:
    """Return a rank's steps and phases, and the waiting part and the transfer part of each exchange."""
    steps = rank.steps
    phases = rank.phases
    exchanges = _chosen(phases, (*EXCHANGE, *PIPELINE))
    waits = exchanges[exchanges["waited"] > 0]
    transfers = exchanges[exchanges["waited"] < exchanges["end"] - exchanges["start"]]
    arrived = transfers["start"] + transfers["waited"]
    others = tuple(name for name in PHASES if name not in MOVES)
    return [
        _timed(rank, STEP, ['"cat":"step","name":"step %d"'], steps["start"], steps["end"], (steps["step"],)),
        _phases(rank, _chosen(phases, MOVES), ("step", "bytes")),
        _phases(rank, _chosen(phases, others), ("step",)),
        _timed(rank, WAIT, ['"cat":"wait","name":"wait"'], waits["start"], waits["start"] + waits["waited"]),
        _timed(rank, TRANSFER, ['"cat":"transfer","name":"transfer"'], arrived, transfers["end"]),
    ]


def _chosen(spans: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    return spans[np.array([name in names for name in NAMES])[spans["phase"]]]


def _phases(rank: RankSpans, spans: np.ndarray, arguments: tuple[str, ...]) -> Lines:
    shown = ",".join(f'"{name}":%d' for name in arguments)
    templates = [f'"cat":"{CATEGORY_OF.get(name, "other")}","name":"{name}","args":{{{shown}}}' for name in NAMES]
    values = tuple(spans[name] for name in arguments)
    return _timed(rank, PHASE, templates, spans["start"], spans["end"], values, spans["phase"])


def _timed(rank: RankSpans, order: int, about: list[str], start, end, values=(), kinds=None) -> Lines:
    """Return slices from `start` to `end` (ns). about: templates of an event's other fields, which values fill."""
    who = f'"pid":{rank.place["node"] + 1},"tid":{rank.place["rank"] + 1}'
    templates = [f',\n{{"ph":"X",{who},"ts":%d.%03d,"dur":%d.%03d,{text}}}' for text in about]
    return Lines(start, order, templates, (*divmod(start, 1000), *divmod(end - start, 1000), *values), kinds)


def _counter(node: int, rates: np.ndarray) -> Lines:
    """Return the counter of a node's ports: MB/s with three decimals."""
    template = (
        f',\n{{"ph":"C","pid":{node + 1},"ts":%d.%03d,"name":"ports MB/s","args":{{"in":%d.%03d,"out":%d.%03d}}}}'
    )
    into = divmod(rates["in"] // 1000, 1000)
    out = divmod(rates["out"] // 1000, 1000)
    return Lines(rates["time"], RATE, [template], (*divmod(rates["time"], 1000), *into, *out))
