"""Parts of make_docs.py: what the verdict says of runs with known faults, and how a report looks. As root."""

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from scripts.makers.pages.page import FIGURES, SCRIPTS, SUITES, replace_block, train_on

REPEAT = 3
REPORTED = "--nodes 5 --ranks 9 --ranks-per-node 2 --rate 400mbit"
REPORTED_TRAINING = "--n-layer 4 --n-head 4 --n-embd 256 --batch-size 2 --steps 12 --eval-every 0"
PAGE_SIZE = "1040,1060"


def faults(folder: Path, _) -> None:
    """Every case of fault_suite.py, three runs each."""
    command = [sys.executable, str(SUITES / "fault_suite.py"), "--out", str(folder / "runs"), "--repeat", str(REPEAT)]
    report = folder / "faults.json"
    subprocess.run([*command, "--json", str(report)], check=True)
    replace_block("docs/diagnosis.md", "faults", table(json.loads(report.read_text())))


def report(folder: Path, _) -> None:
    """The top of a report's page as a browser shows it."""
    run = train_on(REPORTED, "reduce-bcast", REPORTED_TRAINING, folder / "run")
    subprocess.run([sys.executable, str(SCRIPTS / "plot.py"), str(run)], check=True)
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    browser += [f"--user-data-dir={folder / 'browser'}", f"--window-size={PAGE_SIZE}"]
    picture = f"--screenshot={FIGURES / 'report.png'}"
    subprocess.run([*browser, picture, f"file://{run / 'report.html'}"], check=True)


def table(report: dict) -> str:
    """A line a case: what was done, how many runs were named right, what the verdict of the first said."""
    lines = ["| what was done to the run | right | verdict of the first run |", "|---|---|---|"]
    for _, group in groupby(report["rows"], lambda row: row["case"]):
        rows = list(group)
        right = sum(row["right"] for row in rows)
        lines.append(f"| {rows[0]['says']} | {right} of {len(rows)} | `{rows[0]['kind']}`: {rows[0]['verdict']} |")
    made_on = report["machine"]
    versions = ", ".join(f"{name} {made_on[name]}" for name in made_on if name not in ("processor", "cores"))
    lines += [
        "",
        f"{report['right']} of {len(report['rows'])} runs right: kind, node, rank and direction. "
        "`sudo python tests/suites/fault_suite.py`. "
        f"Made on {made_on['processor']}, {made_on['cores']} cores, {versions}.",
    ]
    return "\n".join(lines)
