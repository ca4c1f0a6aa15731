"""Check the JSON of a run folder when it is read, so that later code can rely on it.

A dict of rules describes an object: the field's name, and the rule for its value. Fields without a rule may hold
anything. Numbers are finite and in range, and names are printable. All checks raise ValueError with half a line: the
field, its value, and the expected value.
"""

import json
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

MOST_RANKS = 100_000  # five digits in the files' names
LATEST_NS = 1 << 58  # nine years after the machine started; the exports multiply times by eight
LARGEST = 1e15
LARGEST_LOSS = 1e100
LONGEST_NAME = 255
LONGEST_PATH = 4096


@dataclass(frozen=True)
class Rule:
    """A test of a value, and how to say what it expects."""

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
    """Return the rule that a value is one of these, and of the same type: 1 is not True."""
    known = [(type(value), value) for value in values]
    return Rule(lambda value: (type(value), value) in known, " or ".join(map(shown, values)))


def shown(value) -> str:
    """Shorten a value to one line of a message."""
    return reprlib.repr(value)


def _is_number(value) -> bool:
    return type(value) in (int, float)


def _is_name(value) -> bool:
    """Return whether it can be a name: spaces would split it in tables and exports; plots read $...$ as a formula."""
    return type(value) is str and 0 < len(value) <= LONGEST_NAME and value.isprintable() and not set(value) & set(" $")


def _is_strategy(value) -> bool:
    """Return whether it is a name, or the full path of the user's Python file, whose file name is a name."""
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
TIME_NS = integer(0, LATEST_NS)
RANK = integer(0, MOST_RANKS - 1)
RANKS = integer(1, MOST_RANKS)
STEP_NUMBER = integer(0, 2**31 - 1)
SIZE = integer(1, 10**6)
RATE = number(1e3, 1e13)  # bytes/s: from a modem to 10 TB/s

PLACE = {"rank": RANK, "node": RANK, "host": NAME}
IDENTITY = {"rank": RANK, "ranks": RANKS, "node": RANK, "host": NAME}
# Where ranks share a model: the rank's data-parallel replica, tensor-parallel shard and pipeline stage.
MESH_PLACE = {"copy": RANK, "part": RANK, "stage": RANK}
CLOCK = {"offset_ns": integer(-LATEST_NS, LATEST_NS), "error_ns": TIME_NS}
LINK = {"node": RANK, "host": NAME, "latency_s": number(0, 10), "in": RATE, "out": RATE, "both": RATE}
SETTINGS = {
    "strategy": STRATEGY,
    "server": one_of("colocated", "dedicated"),
    "wire": one_of("float32", "bfloat16", "int8"),
    "overlap": one_of(False, True),
    "model": NAME.or_none(),
    "grad_accum": integer(1, 10_000),
    "steps": STEP_NUMBER,
    "pipeline_layers": Rule(_is_layers, "numbers of layers, as in 4,4,4,0").or_none(),
    "pipeline_schedule": one_of("1f1b", "gpipe"),
}
SIZES = ("n_layer", "n_head", "n_embd", "context", "vocab_size", "batch_size", "seq_len")
SETTINGS |= dict.fromkeys((*SIZES, "tensor_parallel", "pipeline_parallel"), SIZE.or_none())
# tflops: each rank's rate in 10**12 operations a second; null for a server; null instead of the list if unknown.
PEAK = {"tflops": number(0, LARGEST).or_none().listed().or_none(), "source": TEXT}
# The version of the project's code; null if unknown.
CODE = {"commit": TEXT.or_none(), "dirty": one_of(False, True, None), "version": TEXT.or_none()}
MOMENT = Rule(_is_moment, "a date and time")
CONFIG = {
    "parameters": integer(1, 10**11),
    "mpi_library": TEXT,
    "command": TEXT.listed(),
    "started": MOMENT,
    "resumed_step": STEP_NUMBER.or_none(),
    "same_weights": one_of(False, True),
    "exchange_period": SIZE,
}
EARLIER = {"started": MOMENT, "resumed_step": STEP_NUMBER.or_none(), "ranks": RANKS}
# These are null when a run has diverged, because JSON has no nan.
DIVERGING = dict.fromkeys(("loss", "val_loss", "grad_norm"), ANY_NUMBER.or_none())
LOG_ROW = DIVERGING | {
    "step_s": POSITIVE,
    "tokens_per_s": POSITIVE,
    "elapsed_s": NOT_NEGATIVE,
    "exposed_exchange_s": NOT_NEGATIVE,
    "lr": ANY_NUMBER,
    "tokens": NOT_NEGATIVE,
    "mfu": NOT_NEGATIVE,
    "slowest_rank": RANK,
    "slowest_excess": ANY_NUMBER,
    "skipped": one_of(True),
    "peak_underestimated": one_of(True),
    "pipeline_wait_s": NOT_NEGATIVE,
    "peak_memory_bytes": NOT_NEGATIVE,
    "gpu_memory_bytes": NOT_NEGATIVE,
}


def parse(text: bytes):
    """Decode JSON in UTF-8. ValueError also if an object has a name twice."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _without_doubles(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice in one object")
    return found


def check_fields(what: str, found, required: dict[str, Rule], optional: dict[str, Rule] | None = None) -> None:
    """Check a JSON object, which messages call `what`."""
    if type(found) is not dict:
        raise ValueError(f"{what} is {shown(found)}, expected a JSON object")
    missing = [name for name in required if name not in found]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    for name, rule in (required | (optional or {})).items():
        if name in found and not rule.accepts(found[name]):
            raise ValueError(f"{what} says {name} {shown(found[name])}, expected {rule.expected}")


def check_config(config) -> None:
    """Check config.json. It needs settings.strategy; other fields may be missing, but not wrong."""
    check_fields("it", config, {"settings": Rule(lambda value: type(value) is dict, "an object")}, CONFIG)
    settings = config["settings"]
    check_fields("settings", settings, {"strategy": STRATEGY}, dict.fromkeys(settings, SETTING) | SETTINGS)
    versions = config.get("versions") or {}
    check_fields("versions", versions, {}, dict.fromkeys(versions, TEXT) if type(versions) is dict else {})
    for name, required, optional in (("peak", PEAK, {}), ("code", {}, CODE)):
        if config.get(name) is not None:
            check_fields(name, config[name], required, optional)
    for name, rules in (("ranks", PLACE), ("links", LINK), ("mesh", MESH_PLACE), ("earlier", EARLIER)):
        entries = config.get(name) or []
        if type(entries) is not list:
            raise ValueError(f"{name} is {shown(entries)}, expected a list")
        for entry in entries:
            check_fields(f"an entry of {name}", entry, rules)
    _check_nodes(config.get("ranks") or [], config.get("links") or [])


def _check_nodes(places: list[dict], links: list[dict]) -> None:
    """Check that ranks and nodes are numbered from 0, and that no two links are of the same node."""
    if [place["rank"] for place in places] != list(range(len(places))):
        raise ValueError("ranks are not numbered 0, 1, ... in order")
    nodes = {place["node"] for place in places}
    linked = [link["node"] for link in links]
    if places and nodes != set(range(len(nodes))):
        raise ValueError("the ranks' nodes are not numbered from 0 without gaps")
    if len(set(linked)) < len(linked) or (places and not set(linked) <= nodes):
        raise ValueError("a link is of a node that has another link, or no rank")


def check_identity(identity) -> None:
    """Check which rank wrote a trace, and its place in a model that ranks share."""
    check_fields("its header", identity, IDENTITY, {"local_rank": RANK, "strategy": STRATEGY})
    ranks = identity["ranks"]
    if max(identity["rank"], identity["node"]) >= ranks:
        raise ValueError(f"its header says rank and node {identity['rank']}, {identity['node']} of {ranks}")
    if {"mesh", *MESH_PLACE} & identity.keys():
        check_fields("its header", identity, MESH_PLACE | {"mesh": RANKS.listed()})
        counts = identity["mesh"]
        place = [identity[name] for name in MESH_PLACE]
        if len(counts) != 3 or math.prod(counts) != ranks or any(map(int.__ge__, place, counts)):
            found = f"replica, shard and stage {place} of {counts}"
            raise ValueError(f"its header says {found}, which is not a place among {ranks} ranks")


def check_clock(clock) -> None:
    check_fields("its clock", clock, CLOCK, {"at_ns": TIME_NS})
