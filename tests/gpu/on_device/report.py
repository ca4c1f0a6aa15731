"""What `make test-gpu` writes: the GPU, versions, and how each test ended; on disk after each of them."""

import json
from pathlib import Path


class GpuReport:
    """A pytest plugin. Whatever a test recorded by record_property stands beside its outcome."""

    def __init__(self, file: Path):
        self.file, self.report = file, {"machine": {}, "summary": {}, "tests": {}}
        file.parent.mkdir(parents=True, exist_ok=True)

    def put_machine(self, facts: dict) -> None:
        self.report["machine"] = facts
        self._write()

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        entry = {"outcome": report.outcome, "seconds": round(report.duration, 1)} | dict(report.user_properties)
        if report.skipped:
            entry["reason"] = report.longrepr[2]
        elif report.failed:
            entry["error"] = report.longreprtext[-4000:]
        self.report["tests"][report.nodeid] = entry
        outcomes = [test["outcome"] for test in self.report["tests"].values()]
        self.report["summary"] = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        self._write()

    def _write(self):
        self.file.write_text(json.dumps(self.report, indent=1) + "\n")
