"""A reader of Chrome's trace event JSON that says what Perfetto would drop, move or not understand."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

EXCHANGES = {"reduce", "reduce_scatter", "allreduce", "bcast", "allgather", "tensor", "lend", "borrow", "norm"}
EXCHANGES |= {"send", "recv"}


class Broken(Exception):
    """What is wrong with a trace."""


def demand(holds, what):
    if not holds:
        raise Broken(what)


@dataclass
class Trace:
    """slices: per (pid, tid) a list of (depth, name, start ns, end ns, arguments); counters: per pid (ns, values)."""

    slices: dict
    counters: dict
    names: dict  # of pid, or (pid, tid)
    order: dict  # of (pid, tid)


def check(path) -> Trace:
    """Read the file; raises Broken."""
    path = Path(path)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        document = json.load(file)
    demand("displayTimeUnit" not in document, "displayTimeUnit is ignored, or scales the times")
    trace = Trace(defaultdict(list), defaultdict(list), {}, {})
    last = 0
    for event in document["traceEvents"]:
        demand(event.get("ph") in ("M", "X", "C"), f"of another kind: {event}")
        demand(is_whole(event.get("pid")), f"pid of {event}")
        demand(event["ph"] == "C" or event.get("name") in ("process_name", "process_sort_index")
               or is_whole(event.get("tid")), f"tid of {event}")  # fmt: skip
        if event["ph"] == "M":
            read_metadata(event, trace)
            continue
        demand(is_number(event.get("ts")) and event["ts"] >= last, f"time of {event}, after {last}")
        last = event["ts"]
        (read_slice if event["ph"] == "X" else read_counter)(event, trace)
    for thread, slices in trace.slices.items():
        demand(thread in trace.names and thread[0] in trace.names, f"thread {thread} has no name")
        trace.slices[thread] = nest(thread, slices)
    demand(len({tid for _, tid in trace.slices}) == len(trace.slices), "a rank on two nodes")
    return trace


def is_whole(number) -> bool:
    return type(number) is int and 1 <= number < 1 << 32


def is_number(value) -> bool:
    return type(value) in (int, float) and value == value


def ns(microseconds) -> int:
    """As Perfetto rounds."""
    return round(microseconds * 1000)


def read_metadata(event, trace):
    demand(event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index"), f"name {event}")
    if event["name"].endswith("_name"):
        key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
        demand(isinstance(event["args"]["name"], str), f"name of {event}")
        demand(key not in trace.names, f"{key} is named twice")
        trace.names[key] = event["args"]["name"]
    elif event["name"] == "thread_sort_index":
        trace.order[event["pid"], event["tid"]] = event["args"]["sort_index"]


def read_slice(event, trace):
    demand(is_number(event.get("dur")) and event["dur"] > 0, f"length of {event}")
    demand(event.get("name") and event.get("cat"), f"name or category of {event}")
    start = ns(event["ts"])
    # Both were whole nanoseconds, and their sum must be compared as such.
    entry = (event["name"], start, start + ns(event["dur"]), event.get("args", {}))
    trace.slices[event["pid"], event["tid"]].append(entry)


def read_counter(event, trace):
    demand(event.get("args") and all(is_number(value) and value >= 0 for value in event["args"].values()),
           f"not numbers: {event}")  # fmt: skip
    trace.counters[event["pid"]].append((ns(event["ts"]), event["args"]))


def nest(thread, slices):
    """The slices with their depths; each lies wholly in the one around it, and in one of the right kind."""
    around, result = [], []
    for name, start, end, arguments in slices:
        while around and around[-1][1] <= start:
            around.pop()
        demand(not around or end <= around[-1][1], f"{name} of {thread} at {start} overlaps {around and around[-1][0]}")
        outer = around[-1][0] if around else None
        if name in ("wait", "transfer") and outer in EXCHANGES:
            pass
        elif name == "transfer" or name.startswith("step "):
            demand(outer is None, f"{name} of {thread} inside {outer}")
        else:
            demand(outer is None or outer.startswith("step "), f"{name} of {thread} inside {outer}")
        result.append((len(around), name, start, end, arguments))
        around.append((name, end))
    return result
