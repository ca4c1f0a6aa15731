"""Which tests of a pytest run skipped, and why."""

import json
from pathlib import Path


class Skips:
    """A plugin that writes {test's address: reason, or None if it ran} as JSON, for tests/suites/check_skips.py."""

    def __init__(self, file: Path):
        self._file, self._reasons = file, {}

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self._reasons[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        else:
            self._reasons.setdefault(report.nodeid, None)

    def pytest_collectreport(self, report):
        """A whole module may skip."""
        if report.skipped:
            self._reasons[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_sessionfinish(self):
        self._file.write_text(json.dumps(self._reasons, indent=1) + "\n")
