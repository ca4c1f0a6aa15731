"""Parts of make_docs.py: what becomes of runs when something fails, and of one that is killed at random."""

import json
import re
import subprocess
import sys
from pathlib import Path

from scripts.makers.pages.page import ROOT, SUITES, replace_block
from tests.suites.faults.cases import CASES
from tests.suites.random_kills import summary

PAGE, ROWS = "docs/failures.md", ROOT / "docs" / "failures.json"
STATED_S = 10  # longer than that is shown in bold
LONGEST_LINE = 180  # characters


def failures(folder: Path, _) -> None:
    """Every case under the launchers of this Python's MPI; the rows of another MPI's stay in the page."""
    command = [sys.executable, str(SUITES / "failure_suite.py"), "--out", str(folder / "runs"), "--json", str(ROWS)]
    subprocess.run(command, check=True)
    found = json.loads(ROWS.read_text())
    replace_block(PAGE, "failures", matrix(found))
    replace_block(PAGE, "failure messages", messages(found))


def random_kills(folder: Path, _) -> None:
    """Half an hour, a kill a minute."""
    command = [sys.executable, str(SUITES / "random_kills.py"), "--json", str(folder / "kills.json")]
    subprocess.run(command, check=True)
    replace_block(PAGE, "random kills", kills(json.loads((folder / "kills.json").read_text())))


def kills(facts: dict) -> str:
    return f"> {summary(facts)}\n\nMade on {made_on(facts['machine'])}."


def matrix(found: dict) -> str:
    """A line a case, a column a launcher: seconds to the end, exit code, steps lost."""
    launchers, cells = sorted(found["made_on"]), {(row["case"], row["launcher"]): row for row in found["rows"]}
    lines = [f"| | {' | '.join(f'`{name}`' for name in map(short, launchers))} |", "|---" * (len(launchers) + 1) + "|"]
    for case, about in CASES.items():
        rows = [cells.get((case, launcher)) for launcher in launchers]
        lines.append(f"| {about.says} | {' | '.join(cell(row) if row else 'not run' for row in rows)} |")
    same = sum(row["same"] for row in found["rows"])
    refused = sum(row["resumed_code"] == 2 for row in found["rows"])
    skipped = sum(bool(row["skipped"]) for row in found["rows"])
    left = sum(len(row["left_over"]) for row in found["rows"])
    lines += [
        "",
        f"Of {len(found['rows'])} runs {same} ended with the losses of an undisturbed run, bit for bit, {skipped} with "
        f"others, as a step was skipped, and {refused} were not taken up, as no checkpoint was good. Half-written "
        f"files left after that: {left}. Three virtual hosts of one rank each, `--steps 100 --checkpoint-every 10 "
        "--end-on-stall --stall-after 5`, the fault in step 35. Made on:",
        "",
    ]
    return "\n".join(lines + [f"* `{short(name)}`: {made_on(found['made_on'][name])}." for name in launchers])


def short(launcher: str) -> str:
    """`mpirun (MPICH)`, and srun without the MPI that its plugin tells."""
    return launcher if launcher.startswith("mpirun") else launcher.partition(" (")[0]


def made_on(facts: dict) -> str:
    named = [f"{name} {facts[name]}" for name in facts if name not in ("processor", "cores", "system", "mpi")]
    library = [facts["mpi"]] if "mpi" in facts else []
    return ", ".join([facts["processor"], f"{facts['cores']} cores", *library, *named])


def cell(row: dict) -> str:
    """ "0.3 s, code 137, 5 lost"; what should not be in bold."""
    if not row["ended"]:
        return "**does not end**"
    if row["went_on"] and row["code"] == 0:
        text = "goes on, step skipped" if row["skipped"] else "goes on"
        return text if row["same"] or row["skipped"] else f"{text}, **other losses**"
    after_s = row["seconds"] if row["code"] >= 0 else row["gone_s"]  # where the launcher is what was killed
    seconds = f"{after_s:.1f} s"
    parts = ["goes on to the end" if row["went_on"] else f"**{seconds}**" if after_s > STATED_S else seconds]
    parts.append("**code 0**" if row["code"] == 0 else f"code {exit_code(row['code'])}")
    parts.append(lost(row))
    if row["survivors"]:
        parts.append(f"**rank {', '.join(map(str, row['survivors']))} stays**")
    return ", ".join(parts)


def exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code  # as a shell counts a process that a signal has ended


def lost(row: dict) -> str:
    if row["resumed_code"]:
        return f"not resumed: code {row['resumed_code']}"
    if not row["same"]:
        return "**resumed with other losses**"
    return f"{row['last_step'] - row['resumed_from']} lost" if row["last_step"] else "all lost"


def messages(found: dict) -> str:
    """A line a case: what was printed; where only the launcher says something, what each says."""
    lines = ["| | the line |", "|---|---|"]
    for case, about in CASES.items():
        rows = [row for row in found["rows"] if row["case"] == case]
        rows = [row | {"message": row["resumed_message"] or row["message"]} for row in rows]
        own = [row for row in rows if is_ours(row["message"])][:1]
        others = [row for row in rows if row["message"] and not is_ours(row["message"])]
        said = [f"`{shortened(row['message'])}`" for row in own]
        said += [f"{short(row['launcher'])}: `{shortened(row['message'])}`" for row in others]
        lines.append(f"| {about.says} | {'<br>'.join(said) or 'nothing'} |")
    return "\n".join(lines)


def shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE].rsplit(' ', 1)[0]} ..."


def is_ours(line: str) -> bool:
    return bool(line) and not re.search(r"^srun: |^slurmstepd|RUNNING AT|Peer host|noticed that", line)
