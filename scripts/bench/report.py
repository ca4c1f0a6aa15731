"""A benchmark's JSON file."""

import time
from pathlib import Path

from dist.console import say
from gpt2.errors import UserError
from gpt2.files import write_json

KEEP_S = 2.0  # the shortest time between two writes of a growing report


class ReportFile:
    """The JSON file of a report. With path=None, nothing is written."""

    def __init__(self, path: Path | None):
        self._path = path
        self._kept_at = float("-inf")
        self._has_warned = False

    def write(self, report: dict) -> None:
        """Write the report. Raise UserError if the file cannot be written."""
        if self._path is not None:
            write_json(self._path, report)

    def keep(self, report: dict) -> None:
        """Write a growing report, at most every KEEP_S seconds. If the disk is full, warn once and go on."""
        if time.monotonic() - self._kept_at < KEEP_S:
            return
        try:
            self.write(report)
        except UserError as error:
            if not self._has_warned:
                say(f"warning: {error}; measuring continues", on_stderr=True)
            self._has_warned = True
        self._kept_at = time.monotonic()
