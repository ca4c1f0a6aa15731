"""What the files of a run may say, checked once as they are read: nothing after it meets a surprise.

Times and rates have no checksum, so a damaged one may pass for another value; but numbers are finite and in range,
names can be printed, and a rank's spans follow each other as the tracer writes them. Each function raises ValueError
with what is wrong, in half a line.
"""

import errno
import json
import math
import os
import reprlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from traces.record.phases import INDEX, STEP

MOST_RANKS = 100_000  # five digits in the files' names
MOST_PARAMETERS = 10**11
LATEST_NS = 1 << 58  # nine years after the machine has started; the exports multiply times by eight
MOST_COUNTED_PER_NS = 10_000  # 10 TB/s through a node's ports
LARGEST, LARGEST_LOSS = 1e15, 1e100
LONGEST_NAME, LONGEST_PATH = 255, 4096


def regular(path, flags: int) -> int:
    """An opener, as open() takes one, that opens no pipe and no device: such a one may wait for ever for its writer."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(mode := os.fstat(handle).st_mode) and not stat.S_ISDIR(mode):  # of a folder open() complains
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def read_bytes(path) -> bytes:
    """Of a regular file. OSError: it is none, or cannot be read."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def shown(value) -> str:
    """A value as a message may show it: short, on one line."""
    return reprlib.repr(value)


@dataclass(frozen=True)
class Rule:
    """What a value must be: the test, and how to say it."""

    accepts: Callable[[object], bool]
    expected: str

    def or_none(self) -> "Rule":
        return Rule(lambda value: value is None or self.accepts(value), f"{self.expected} or null")

    def listed(self) -> "Rule":
        return Rule(
            lambda value: type(value) is list and all(map(self.accepts, value)), f"a list, each {self.expected}"
        )


def integer(low: int, high: int) -> Rule:
    return Rule(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def number(low: float, high: float) -> Rule:
    return Rule(lambda value: _is_number(value) and low <= value <= high, f"a number from {low:g} to {high:g}")


def one_of(*values) -> Rule:
    """A value of the same type, too: 1 is not True."""
    known = [(type(value), value) for value in values]
    return Rule(lambda value: (type(value), value) in known, " or ".join(map(shown, values)))


def one_of_each(known) -> Rule:
    """A list of some of them, none twice."""
    return Rule(
        lambda value: type(value) is list and all(name in known for name in value) and len(set(value)) == len(value),
        f"a list of some of {', '.join(known)}",
    )


def _is_number(value) -> bool:
    return type(value) in (int, float)


def _is_name(value) -> bool:
    """Plots take what stands between two $ for a formula."""
    return type(value) is str and 0 < len(value) <= LONGEST_NAME and value.isprintable() and not set(value) & set(" $")


def _is_strategy(value) -> bool:
    """One of the user's own is the full path of its Python file, and is shown by the file's name."""
    is_file = type(value) is str and value.endswith(".py") and len(value) <= LONGEST_PATH and value.isprintable()
    return _is_name(value.rpartition("/")[2].removesuffix(".py") if is_file else value)


def _is_moment(value) -> bool:
    try:
        datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_layers(value) -> bool:
    return type(value) is str and all(count.isdecimal() and len(count) < 6 for count in value.split(","))


def _is_plain(value) -> bool:
    return value is None or type(value) in (bool, int, float, str)


NAME = Rule(_is_name, "a name without spaces or $")
STRATEGY = Rule(_is_strategy, "a name without spaces or $, or the path of a Python file of such a name")
TEXT = Rule(lambda value: type(value) is str, "text")
POSITIVE = number(1 / LARGEST, LARGEST)
NOT_NEGATIVE = number(0, LARGEST)
ANY_NUMBER = Rule(lambda value: _is_number(value) and not LARGEST_LOSS <= abs(value) < math.inf, "a number")
SETTING = Rule(lambda value: _is_plain(value) or (type(value) is list and all(map(_is_plain, value))), "a plain value")
TIME_NS, OFFSET_NS = integer(0, LATEST_NS), integer(-LATEST_NS, LATEST_NS)
RANK, STEP_NUMBER = integer(0, MOST_RANKS - 1), integer(0, np.iinfo(np.int32).max)

PLACE = {"rank": RANK, "node": RANK, "host": NAME}
IDENTITY = {"rank": RANK, "ranks": integer(1, MOST_RANKS), "node": RANK, "host": NAME}
MESH_PLACE = dict.fromkeys(("copy", "part", "stage"), RANK)
COUNTS = Rule(
    lambda value: type(value) is list and len(value) == 3 and all(integer(1, MOST_RANKS).accepts(one) for one in value),
    "how many copies, parts and stages there are",
)
CLOCK = {"offset_ns": OFFSET_NS, "error_ns": TIME_NS}
RATE, LATENCY = number(1e3, 1e13), number(0, 10)  # from a modem to 10 TB/s; the slowest satellite
LINK = {"node": RANK, "host": NAME, "latency_s": LATENCY, "in": RATE, "out": RATE, "both": RATE}
SIZES = "n_layer", "n_head", "n_embd", "context", "vocab_size", "batch_size", "seq_len"
SETTINGS = {
    "strategy": STRATEGY,
    "server": one_of("colocated", "dedicated"),
    "wire": one_of("float32", "bfloat16"),
    "overlap": one_of(False, True),
    "model": NAME.or_none(),
    "grad_accum": integer(1, 10_000),
    "steps": STEP_NUMBER,
    "pipeline_layers": Rule(_is_layers, "numbers of layers, as in 4,4,4,0").or_none(),
    "pipeline_schedule": one_of("1f1b", "gpipe"),
} | dict.fromkeys((*SIZES, "tensor_parallel", "pipeline_parallel"), integer(1, 10**6).or_none())
# tflops: each rank's rate in 10**12 operations a second, null for a server; null instead of the list where unknown.
PEAK = {"tflops": number(0, LARGEST).or_none().listed().or_none(), "source": TEXT}
# Of the project's code: null where git did not say it, then the package's version, too.
CODE = {"commit": TEXT.or_none(), "dirty": one_of(False, True, None), "version": TEXT.or_none()}
CONFIG = {
    "parameters": integer(1, MOST_PARAMETERS),
    "mpi_library": TEXT,
    "command": TEXT.listed(),
    "started": Rule(_is_moment, "a date and time"),
    "resumed_step": STEP_NUMBER.or_none(),
}
EARLIER = {"started": CONFIG["started"], "resumed_step": STEP_NUMBER.or_none(), "ranks": integer(1, MOST_RANKS)}
# Of a run that has diverged these are null, as JSON has no word for nan.
DIVERGING = dict.fromkeys(("loss", "val_loss", "grad_norm"), ANY_NUMBER.or_none())
LOG_ROW = DIVERGING | {"step_s": POSITIVE, "tokens_per_s": POSITIVE, "elapsed_s": NOT_NEGATIVE}
LOG_ROW |= {"exposed_exchange_s": NOT_NEGATIVE, "lr": ANY_NUMBER, "tokens": NOT_NEGATIVE}
LOG_ROW |= {"mfu": NOT_NEGATIVE, "slowest_rank": RANK, "slowest_excess": ANY_NUMBER, "skipped": one_of(True)}
LOG_ROW |= {"peak_underestimated": one_of(True), "pipeline_wait_s": NOT_NEGATIVE}
LOG_ROW |= {"peak_memory_bytes": NOT_NEGATIVE, "gpu_memory_bytes": NOT_NEGATIVE}


def parse(text: bytes):
    """A JSON value: UTF-8, no name twice in an object."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _without_doubles(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def check_fields(what: str, found, required: dict[str, Rule], optional: dict[str, Rule] | None = None) -> None:
    """`what` is how the object is called in the message. Names without a rule may hold anything."""
    if type(found) is not dict:
        raise ValueError(f"{what} is {shown(found)}, expected a JSON object")
    missing = [name for name in required if name not in found]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    for name, rule in (required | (optional or {})).items():
        if name in found and not rule.accepts(found[name]):
            raise ValueError(f"{what} says {name} {shown(found[name])}, expected {rule.expected}")


def check_config(config) -> None:
    """config.json: settings.strategy must be there; of all else what is there must be right."""
    check_fields("it", config, {"settings": Rule(lambda value: type(value) is dict, "an object")}, CONFIG)
    settings = config["settings"]
    check_fields("settings", settings, {"strategy": STRATEGY}, dict.fromkeys(settings, SETTING) | SETTINGS)
    versions = config.get("versions") or {}
    check_fields("versions", versions, {}, dict.fromkeys(versions, TEXT) if type(versions) is dict else {})
    for name, required, optional in (("peak", PEAK, {}), ("code", {}, CODE)):
        if config.get(name) is not None:
            check_fields(name, config[name], required, optional)
    places, links, mesh, earlier = (config.get(name) or [] for name in ("ranks", "links", "mesh", "earlier"))
    lists = ("ranks", places, PLACE), ("links", links, LINK), ("mesh", mesh, MESH_PLACE), ("earlier", earlier, EARLIER)
    for name, found, rules in lists:
        if type(found) is not list:
            raise ValueError(f"{name} is {shown(found)}, expected a list")
        for one in found:
            check_fields(f"an entry of {name}", one, rules)
    if [place["rank"] for place in places] != list(range(len(places))):
        raise ValueError("ranks are not numbered 0, 1, ... in order")
    nodes, linked = {place["node"] for place in places}, [link["node"] for link in links]
    if places and nodes != set(range(len(nodes))):
        raise ValueError("the ranks' nodes are not numbered from 0 without gaps")
    if len(set(linked)) < len(linked) or (places and not set(linked) <= nodes):
        raise ValueError("a link is of a node that has one already, or has no rank")


def check_identity(identity) -> None:
    """Who wrote a trace."""
    check_fields("its header", identity, IDENTITY, {"local_rank": RANK, "strategy": STRATEGY})
    if max(identity["rank"], identity["node"]) >= identity["ranks"]:
        raise ValueError(f"its header says rank and node {identity['rank']}, {identity['node']} of {identity['ranks']}")
    if {"mesh", *MESH_PLACE} & identity.keys():
        _check_mesh_place(identity)


def _check_mesh_place(identity: dict) -> None:
    """Of a rank that shares a model: among so many copies, parts and stages, where it is."""
    check_fields("its header", identity, MESH_PLACE | {"mesh": COUNTS})
    counts, place = identity["mesh"], [identity[name] for name in MESH_PLACE]
    if math.prod(counts) != identity["ranks"] or any(at >= count for at, count in zip(place, counts, strict=True)):
        found = f"copy, part and stage {place} of {counts}"
        raise ValueError(f"its header says {found}, which is no place among {identity['ranks']} ranks")


def check_clock(clock) -> None:
    check_fields("its clock", clock, CLOCK, {"at_ns": TIME_NS})


def check_records(records: np.ndarray, ranks: int) -> None:
    """Array of files.RECORD as a tracer leaves it: by their ends, phases after each other, steps around phases."""
    step, end = records["step"], records["end"]
    _check_spans(records, ranks)
    _demand(np.diff(step) >= 0, "a step comes after a later one")
    _demand(np.diff(end) >= 0, "a span was written before an earlier one")
    is_step = records["phase"] == INDEX[STEP]
    phases, steps = records[~is_step], records[is_step]
    _demand(phases["start"][1:] >= phases["end"][:-1], "two phases overlap")
    _demand(steps["start"][1:] >= steps["end"][:-1], "two steps overlap")
    _demand(np.diff(steps["step"]) > 0, "a step is there twice")
    _demand(steps["end"] > steps["start"], "a step took no time")
    _check_edges(phases, steps, np.flatnonzero(is_step).searchsorted(np.flatnonzero(~is_step)))


def check_calls(calls: np.ndarray, ranks: int) -> None:
    """Array of files.RECORD of calls that may overlap: by their ends, each with a root."""
    _check_spans(calls, ranks)
    _demand(calls["root"] >= 0, "a call has no root")
    _demand(np.diff(calls["end"]) >= 0, "a call was written before an earlier one")


def _check_spans(spans: np.ndarray, ranks: int) -> None:
    start, end, root = (spans[name] for name in ("start", "end", "root"))
    is_times = (start >= 0) & (start <= end) & (end <= LATEST_NS)
    _demand(is_times, "a span ends before it begins, or its times are none")
    known = (spans["step"] >= 0) & (spans["bytes"] >= 0) & (root >= -1) & (root < ranks)
    _demand(known, "a step, root or size is impossible")


def _check_edges(phases: np.ndarray, steps: np.ndarray, following: np.ndarray) -> None:
    """No phase goes across a step's edge. following: (phases,) the index of the first step written after each."""
    has_one, has_last = following < len(steps), following > 0
    own, last = steps[following[has_one]], steps[following[has_last] - 1]
    one = phases[has_one]
    begins_inside = np.where(one["step"] == own["step"], one["start"] >= own["start"], one["end"] <= own["start"])
    _demand(begins_inside, "a phase overlaps the edge of its step")
    _demand(phases["start"][has_last] >= last["end"], "a phase overlaps the step before it")


def check_samples(samples: np.ndarray) -> None:
    """Array of counters.COUNTERS as a node leaves it: by time. A counter may begin anew, but not outrun its ports."""
    times, counted = samples["time"], [samples[name] for name in samples.dtype.names[1:]]
    _demand((times >= 0) & (times <= LATEST_NS), "a time is none")
    _demand(np.diff(times) >= 0, "a sample comes before an earlier one")
    for values in counted:
        _demand(values >= 0, "a counter is negative")
        _demand(np.diff(values) // MOST_COUNTED_PER_NS <= np.diff(times), "a counter runs faster than any port")


def _demand(holds: np.ndarray, otherwise: str) -> None:
    if not holds.all():
        raise ValueError(otherwise)
