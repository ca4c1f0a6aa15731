"""Read and check the JSON files of a run folder; handle missing parts of a run."""

import math
from pathlib import Path

import numpy as np

from traces.read import schemas
from traces.read.tails import read_bytes, read_lines
from traces.record.files import END_CLOCKS, END_LINKS, RUN_FORMAT, RunError

AT_END = {END_CLOCKS: schemas.CLOCK | {"node": schemas.RANK, "at_ns": schemas.TIME_NS}, END_LINKS: schemas.LINK}


class Gaps:
    """Missing or damaged parts of a run. allowed: collect them in `found`; otherwise the first one raises RunError."""

    def __init__(self, allowed: bool):
        self.allowed = allowed
        self.found = []

    def add(self, problem: str) -> None:
        if not self.allowed:
            raise RunError(problem)
        self.found.append(problem)

    def left_out(self, path: Path, error: Exception) -> None:
        """Note that an optional file is not used."""
        self.found.append(f"{path} is damaged and left out: {error}")


def read_config(path, gaps: Gaps | None = None) -> dict:
    """Read config.json of a run folder, checked by schemas.check_config. RunError with one line.

    Returns {} for a missing or damaged file if `gaps` allows it. `path` must be a folder, and the format known.
    """
    folder = Path(path)
    gaps = gaps or Gaps(allowed=False)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give the folder that scripts/train.py --out wrote")
    path = folder / "config.json"
    try:
        config = schemas.parse(read_bytes(path))
        if type(config) is dict and (found := config.get("format")) != RUN_FORMAT:
            text = f"{path} has format {schemas.shown(found)}, expected {RUN_FORMAT!r}"
            raise RunError(f"{text}; read it with the release that wrote it")
        schemas.check_config(config)
        return config
    except FileNotFoundError:
        gaps.add(f"{path} is missing, so {folder} is not a run folder; give what --out named")
    except (OSError, ValueError) as error:
        gaps.add(f"{path} is not what scripts/train.py writes (JSON with settings.strategy): {error}; restore it")
    return {}


def read_log(path, gaps: Gaps | None = None, most_bytes: int | None = None) -> list[dict]:
    """Read the rows of log.jsonl, sorted by step; the run need not have traces. RunError with one line.

    A torn last line is dropped. If a step was written twice (--resume), the later row counts. A null loss or norm
    becomes nan. If `gaps` allows it, the log may be missing, and damaged lines are skipped. most_bytes: see read_run.
    """
    path = Path(path) / "log.jsonl"
    gaps = gaps or Gaps(allowed=False)
    try:
        lines = read_lines(path, most_bytes)
    except FileNotFoundError:
        gaps.add(f"{path} is missing; a training run writes it from its first step on")
        return []
    except OSError as error:
        gaps.add(f"{path} cannot be read ({error.strerror}); check its permissions and the disk")
        return []
    rows = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = schemas.parse(line)
            schemas.check_fields("it", row, {"step": schemas.STEP_NUMBER}, schemas.LOG_ROW)
            rows[row["step"]] = row | {name: math.nan for name in schemas.DIVERGING if row.get(name, 0) is None}
        except ValueError as error:
            gaps.add(f"{path}, line {number}, is not a JSON object with a step: {error}; remove the line")
    return [rows[step] for step in sorted(rows)]


def log_column(log: list[dict], name: str) -> np.ndarray:
    """Return (S,) float64 of a field of log.jsonl, nan in rows that lack it."""
    return np.array([np.nan if (value := row.get(name)) is None else value for row in log], np.float64)


def read_measured_at_end(folder: Path, name: str, gaps: Gaps) -> dict[int, dict]:
    """Read END_CLOCKS or END_LINKS of a folder of traces, by node; {} where the file is missing or damaged."""
    path = folder / name
    if not path.exists():  # the run did not reach its end
        return {}
    try:
        found = schemas.parse(read_bytes(path))
        if type(found) is not list:
            raise ValueError("it is not a list of nodes")
        for node in found:
            schemas.check_fields("a node", node, AT_END[name])
        return {node["node"]: node for node in found}
    except (OSError, ValueError) as error:
        gaps.left_out(path, error)
        return {}
