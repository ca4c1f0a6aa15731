"""The starts of a run: the steps that each start made, its number of ranks, and the folder of its traces.

A run that ends early resumes from a checkpoint. Steps after that checkpoint are made twice, and log.jsonl keeps the
later ones (scripts/training/folder.py). So a start's steps go from its checkpoint to the next start's checkpoint. The
traces of earlier starts lie in folders of EARLIER, each with the config.json of that start. Starts are counted from 1.
In all functions `config` is config.json.
"""

import statistics
from pathlib import Path

from traces.read.run_files import read_config
from traces.record.files import RunError

EARLIER = "earlier-traces"


def restarts_of(config: dict) -> dict[int, int]:
    """Return {step: times}: the steps after which the run resumed, as far as the log still has steps before them.

    times: how often it resumed there: more than once if a start made no checkpoint.
    """
    resumed = [one.get("resumed_step") for one in (*(config.get("earlier") or []), config)]
    found = {}
    for step in filter(None, resumed):
        found = {earlier: times for earlier, times in found.items() if earlier <= step}
        found[step] = found.get(step, 0) + 1
    return found


def starts_of(config: dict, log: list[dict]) -> list[dict]:
    """List the starts that have steps in the log: {"start", "first", "last", "ranks", "step_s"} each, in order.

    first, last: its first and last step. step_s: the median duration of its steps, without the first two (compilation)
    if there are more; None if the log lacks it. log: the rows of log.jsonl, sorted by step.
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
    """Return the rows of the log that a start made. starts: as starts_of returns them."""
    spans = [(one["first"], one["last"]) for one in starts if one["start"] == number]
    return [row for row in log if any(first <= row["step"] <= last for first, last in spans)]


def number_of(config: dict) -> int:
    """Return the number of the start that wrote this config.json."""
    return len(config.get("earlier") or []) + 1


def folder_of(path: Path, config: dict, number: int) -> Path:
    """Return the folder with the traces and the config.json of an earlier start. RunError if there is none."""
    if not 1 <= number <= number_of(config):
        raise RunError(f"{path} has no start {number}: expected 1 to {number_of(config)}, the last")
    kept = folders_of(path, config)
    if number not in kept:
        others = ", ".join(map(str, sorted(kept))) or "none"
        raise RunError(
            f"{path / EARLIER} has no traces of start {number} with their config.json; it has starts: {others}"
        )
    return kept[number]


def folders_of(path: Path, config: dict) -> dict[int, Path]:
    """Return {number: folder} of the earlier starts that still have traces and a config.json."""
    begun = [one["started"] for one in config.get("earlier") or []]
    found = {}
    for file in sorted((path / EARLIER).glob("*/config.json")):
        try:
            own = read_config(file.parent)
        except RunError:  # damaged: its start is unknown
            continue
        number = number_of(own)
        if number <= len(begun) and own.get("started") == begun[number - 1]:
            found[number] = file.parent
    return found
