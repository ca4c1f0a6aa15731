"""The starts of one run: which of its steps each of them made, on how many ranks, and where its traces lie.

A run that ends early is taken up again from a checkpoint: its steps after that are made twice, and log.jsonl keeps the
later ones (scripts/training/folder.py). So a start's steps go from its checkpoint to that of the next one. The traces
of a start before the last one lie in a folder of EARLIER with its config.json, by which they are known to be its own.
Starts are counted from 1. `config` is config.json in all that follows.
"""

import statistics
from pathlib import Path

from traces.read.run_files import read_config
from traces.record.files import RunError

EARLIER = "earlier-traces"


def restarts_of(config: dict) -> dict[int, int]:
    """{step: times}: after which steps the run was taken up again, as far as the log still has steps before it.

    times: how often; more than once where a start came to no checkpoint of its own.
    """
    resumed = [one.get("resumed_step") for one in (*(config.get("earlier") or []), config)]
    found = {}
    for step in filter(None, resumed):
        found = {earlier: times for earlier, times in found.items() if earlier <= step}
        found[step] = found.get(step, 0) + 1
    return found


def starts_of(config: dict, log: list[dict]) -> list[dict]:
    """Of each start that has steps left in the log, in order: {"start": its number; "first", "last": steps; "ranks":
    how many; "step_s"}.

    step_s: the median, without the first two steps where there are more, which compile; None where the log lacks it.
    log: the rows of log.jsonl by step.
    """
    starts = [*(config.get("earlier") or []), config | {"ranks": len(config.get("ranks") or [])}]
    begun = [(one.get("resumed_step") or 0, one["ranks"]) for one in starts]
    found = []
    for number, (resumed, ranks) in enumerate(begun):
        end = min([step for step, _ in begun[number + 1 :]], default=None)
        rows = [row for row in log if resumed < row["step"] and (end is None or row["step"] <= end)]
        if rows:
            seconds = [row["step_s"] for row in rows if row.get("step_s") is not None]
            step_s = statistics.median(seconds[2:] or seconds) if seconds else None
            steps = {"first": rows[0]["step"], "last": rows[-1]["step"]}
            found.append({"start": number + 1} | steps | {"ranks": ranks, "step_s": step_s})
    return found


def rows_of(starts: list[dict], number: int, log: list[dict]) -> list[dict]:
    """The rows of the log that a start has made. starts: as starts_of gives them."""
    spans = [(one["first"], one["last"]) for one in starts if one["start"] == number]
    return [row for row in log if any(first <= row["step"] <= last for first, last in spans)]


def number_of(config: dict) -> int:
    """Which start of its run a config.json is of."""
    return len(config.get("earlier") or []) + 1


def folder_of(path: Path, config: dict, number: int) -> Path:
    """The folder that holds the traces of an earlier start of the run at `path`, and its config.json. RunError: there
    is no such start, or nothing was kept of it."""
    if not 1 <= number <= number_of(config):
        raise RunError(f"{path} has no start {number}: expected 1 to {number_of(config)}, the last")
    kept = folders_of(path, config)
    if number not in kept:
        has = f"it has those of {', '.join(map(str, sorted(kept)))}" if kept else "it has none of any"
        raise RunError(f"{path / EARLIER} has no traces of start {number} with their config.json: {has}")
    return kept[number]


def folders_of(path: Path, config: dict) -> dict[int, Path]:
    """{number: folder} of the earlier starts of which traces and config.json were kept."""
    begun, found = [one["started"] for one in config.get("earlier") or []], {}
    for file in sorted((path / EARLIER).glob("*/config.json")):
        try:
            own = read_config(file.parent)
        except RunError:  # damaged; whose it is, it does not say
            continue
        number = number_of(own)
        if number <= len(begun) and own.get("started") == begun[number - 1]:
            found[number] = file.parent
    return found
