"""config.json and log.jsonl of a run folder, read back and checked; and what to do where a part of a run is missing."""

import math
from pathlib import Path

from traces.read import checks
from traces.read.tails import read_lines
from traces.read.trace_files import read_at_end
from traces.record.files import RUN_FORMAT, RunError


class Gaps:
    """What to do where a part of a run is missing: end with a RunError or, if that is allowed, keep it in `found`."""

    def __init__(self, allowed: bool):
        self.allowed, self.found = allowed, []

    def add(self, problem: str) -> None:
        if not self.allowed:
            raise RunError(problem)
        self.found.append(problem)

    def left_out(self, path: Path, error: Exception) -> None:
        """For a file that a run can do without: say that it was not used."""
        self.found.append(f"{path} is damaged and left out: {error}")


def read_config(path, gaps: Gaps | None = None) -> dict:
    """config.json of a run folder, checked (checks.check_config says what holds). RunError with one line.

    {} where it is missing or damaged and `gaps` allows that. What is no folder, or of another format, is never allowed.
    """
    folder, gaps = Path(path), gaps or Gaps(allowed=False)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give the folder that scripts/train.py --out wrote")
    path = folder / "config.json"
    try:
        config = checks.parse(checks.read_bytes(path))
        if type(config) is dict and (found := config.get("format")) != RUN_FORMAT:
            text = f"{path} has format {checks.shown(found)}, expected {RUN_FORMAT!r}"
            raise RunError(f"{text}; read it with the release that wrote it")
        checks.check_config(config)
        return config
    except FileNotFoundError:
        gaps.add(f"{path} is missing, so {folder} is not a run folder; give what --out named")
    except (OSError, ValueError) as error:
        gaps.add(f"{path} is not what scripts/train.py writes (JSON with settings.strategy): {error}; restore it")
    return {}


def read_log(path, gaps: Gaps | None = None, most_bytes: int | None = None) -> list[dict]:
    """The rows of log.jsonl by step, of a run that need not have been traced. RunError with one line.

    A torn last line is dropped; of a step written twice (--resume) the later one counts. What is null as it is no
    number any more becomes nan. Without a log there are no rows, and damaged lines are left out, where `gaps` allows
    that. most_bytes: as read_run's.
    """
    path, gaps = Path(path) / "log.jsonl", gaps or Gaps(allowed=False)
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
            row = checks.parse(line)
            checks.check_fields("it", row, {"step": checks.STEP_NUMBER}, checks.LOG_ROW)
            rows[row["step"]] = row | {name: math.nan for name in checks.DIVERGING if row.get(name, 0) is None}
        except ValueError as error:
            gaps.add(f"{path}, line {number}, is not a JSON object with a step: {error}; remove the line")
    return [rows[step] for step in sorted(rows)]


def read_measured_at_end(folder: Path, name: str, gaps: Gaps) -> dict[int, dict]:
    """END_CLOCKS or END_LINKS of a folder of traces, by node; nothing where they are missing or damaged."""
    try:
        return read_at_end(folder, name)
    except (OSError, ValueError) as error:
        gaps.left_out(folder / name, error)
        return {}
