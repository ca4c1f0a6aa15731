"""Times of all nodes on one clock: rank 0's.

A trace's `clock`, measured at the start of the run: `offset_ns`, to add to the node's times to get rank 0's;
`error_ns`, the bound of that offset's error; `at_ns`, when that was, in the node's own time. RUN/traces/clocks.json
holds the same, measured at the end, for each node: [{"node", "offset_ns", "error_ns", "at_ns"}, ...]. Between the two
the offset is interpolated, as clocks drift by tens of microseconds a second. A run that crashed has the first alone.
"""

import json
from pathlib import Path

import numpy as np

from traces.read import checks

MOST_DRIFT = 0.1  # of the time between the two measurements: no clock runs so wrong


def write_end_clocks(folder, clocks: list[dict]) -> None:
    """clocks: of each node its number and its clock, measured at the end of the run."""
    (Path(folder) / "clocks.json").write_text(json.dumps(clocks) + "\n")


def read_end_clocks(folder) -> dict[int, dict]:
    """The clocks at the end by node; none where the run did not come to its end. OSError, ValueError: damaged."""
    path = Path(folder) / "clocks.json"
    if not path.exists():
        return {}
    found = checks.parse(path.read_bytes())
    if type(found) is not list:
        raise ValueError("no list of clocks")
    for clock in found:
        checks.check_fields("a clock", clock, checks.CLOCK | {"node": checks.RANK, "at_ns": checks.TIME_NS})
    return {clock["node"]: clock for clock in found}


def to_rank_0(times: np.ndarray, start: dict, end: dict | None) -> np.ndarray:
    """Times (int64 ns) of a node on rank 0's clock, from the node's clocks at the start and, if known, at the end.

    ValueError: the two cannot be of one clock.
    """
    if end is None or "at_ns" not in start or end["at_ns"] == start["at_ns"]:
        return times + start["offset_ns"]
    drift = (end["offset_ns"] - start["offset_ns"]) / (end["at_ns"] - start["at_ns"])
    if end["at_ns"] < start["at_ns"] or abs(drift) > MOST_DRIFT:
        raise ValueError("its clock and the one in clocks.json are not the same node's")
    return times + start["offset_ns"] + np.rint((times - start["at_ns"]) * drift).astype(np.int64)


def error_ns(start: dict, end: dict | None) -> int:
    """The bound of the error: the larger of the two."""
    return max(start["error_ns"], end["error_ns"] if end else 0)
