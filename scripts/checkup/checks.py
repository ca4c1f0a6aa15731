"""All checks over the facts of all ranks, and the verdict."""

import importlib

from scripts.checkup.facts import error_text
from scripts.checkup.findings import FAIL, NOTE, SEVERITIES, SLOW, Finding, plural

# Imported one by one: those after the first need NumPy, whose absence the first reports.
MODULES = ("check_software", "check_ranks", "check_memory", "check_network", "check_gpus")


def find(ranks: list[dict], model: str | None = None) -> list[Finding]:
    """The findings, what fails first; a check that meets facts it does not understand is a finding itself."""
    found = []
    for module in MODULES:
        try:
            checks = importlib.import_module(f"scripts.checkup.{module}").CHECKS
        except Exception as error:
            text = f"the checks of {module} were not made: {error_text(error)}"
            # What they import, training imports as well.
            found.append(Finding(FAIL, "doctor", text, "mend that, and start it again"))
            continue
        for check in checks:
            found += _made(check, ranks, model)
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _made(check, ranks: list[dict], model: str | None) -> list[Finding]:
    try:
        return list(check(ranks, model))
    except Exception as error:  # a doctor that falls over helps nobody
        text = f"the check {check.__name__} ended with {error_text(error)}"
        return [Finding(NOTE, "doctor", text, "report it, with what --json writes")]


def verdict(findings: list[Finding], place: dict) -> str:
    """One sentence; place: any rank's."""
    job = f"{plural(place['size'], 'rank')} on {plural(place['nodes'], 'node')}"
    fail, slow = ([finding for finding in findings if finding.severity == severity] for severity in (FAIL, SLOW))
    if fail:
        return f"{job}: training will fail: {_subjects(fail)}"
    if slow:
        return f"{job}: training will run, but slower than it could: {_subjects(slow)}"
    unsure = ", but not every check could be made" if any(finding.about == "doctor" for finding in findings) else ""
    return f"{job}: nothing found that would fail or be slow{unsure}"


def _subjects(findings: list[Finding]) -> str:
    return ", ".join(dict.fromkeys(finding.about for finding in findings))
