"""Bytes from each rank to each other in one exchange of a run's strategy, from its schedule."""

import numpy as np

from dist.cost.mpi_choices import UnknownChoice, library_key
from dist.cost.schedules import SCHEDULES, WIRE_BYTES, schedule
from traces.read.runs import Run


def message_matrix(run: Run) -> np.ndarray | None:
    """(N, N) bytes from rank (row) to rank (column); None for a run whose config.json does not tell, or one rank."""
    config, settings = run.config, run.config["settings"]
    places, parameters = config.get("ranks"), config.get("parameters")
    if not places or not parameters or run.strategy not in SCHEDULES or len(places) < 2:
        return None
    nodes = sorted({place["node"] for place in places})
    placement = [nodes.index(place["node"]) for place in places]
    wire = settings.get("wire") or "float32"
    library = library_key(config.get("mpi_library") or "")
    try:
        stages, _ = schedule(run.strategy, placement, parameters * WIRE_BYTES[wire], library, wire)
    except (UnknownChoice, ValueError):
        return None
    matrix = np.zeros((len(places), len(places)))
    for stage in stages:
        np.add.at(matrix, (stage.source, stage.destination), stage.size * stage.repeat)
    return matrix
