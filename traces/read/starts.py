"""The starts of one run: which of its steps each of them made, on how many ranks, and where its traces lie.

A run that ends early is taken up again from a checkpoint: its steps after that are made twice, and log.jsonl keeps the
later ones (scripts/training/folder.py). So a start's steps go from its checkpoint to that of the next one.
"""

import statistics


def restarts_of(config: dict) -> dict[int, int]:
    """{step: times}: after which steps the run was taken up again, as far as the log still has steps before it.

    times: how often; more than once where a start came to no checkpoint of its own. config: config.json.
    """
    resumed = [one.get("resumed_step") for one in (*(config.get("earlier") or []), config)]
    found = {}
    for step in filter(None, resumed):
        found = {earlier: times for earlier, times in found.items() if earlier <= step}
        found[step] = found.get(step, 0) + 1
    return found


def starts_of(config: dict, log: list[dict]) -> list[dict]:
    """Of each start that has steps left in the log, in order: {"first", "last": steps; "ranks": how many; "step_s"}.

    step_s: the median, without the first two steps where there are more, which compile; None where the log lacks it.
    config: config.json. log: the rows of log.jsonl by step.
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
            found.append({"first": rows[0]["step"], "last": rows[-1]["step"], "ranks": ranks, "step_s": step_s})
    return found
