"""The starts of one run: which of its steps each of them made, on how many ranks, and where its traces lie.

A run that ends early is taken up again from a checkpoint: its steps after that are made twice, and log.jsonl keeps the
later ones (scripts/training/folder.py). So a start's steps go from its checkpoint to that of the next one.
"""


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
