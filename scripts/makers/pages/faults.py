"""Parts of make_docs.py: verdicts on runs with known faults, outcomes of failures, pictures of healthy and sick runs.

For each run the suites write a row with the fault and the outcome.
"""

from functools import cache
from itertools import groupby
from pathlib import Path
from subprocess import CalledProcessError

from PIL import Image

from scripts.makers.pages.page import FIGURES, ROOT, on_hosts, output_of, read
from scripts.prediction.run_prediction import own_schedule
from scripts.reports import figures
from traces import read_run
from traces.plots import look
from traces.verdict.summary import measure_runs

FAILURES = ROOT / "docs" / "failures.json"
DRAWN = ROOT / "docs" / "drawn-faults.json"
DPI = 90
COLOURS = 48  # of a picture


def faults(part, folder: Path) -> str:
    """Return a row per case: the fault, how many verdicts were right, the first verdict."""
    found = run_suite("fault_suite.py", folder, folder / "faults.json", "--cases", part.cases)
    lines = ["| fault | right | verdict of the first run |", "|---|---|---|"]
    for _, group in groupby(found["rows"], lambda row: row["case"]):
        first, *others = group
        right = sum(row["right"] for row in (first, *others))
        verdict = f"`{first['kind']}`: {first['verdict'].partition('; ')[0]}"
        lines.append(f"| {first['says']} | {right} of {1 + len(others)} | {verdict} |")
    (machine,) = found["made_on"].values()
    suite = "`sudo python tests/suites/fault_suite.py`"
    return "\n".join([*lines, "", f"{found['summary']} {suite}. Measured on {made_on(machine)}."])


def drawn_faults(part, folder: Path) -> str:
    """Diagnose random clusters and faults under the MPI of this Python; keep the other sets of rows."""
    for number, flags in enumerate(part.flags):
        run_suite("drawn_faults.py", folder / str(number), DRAWN, *flags.split())
    return drawn_block(read(DRAWN))


def drawn_block(sets: dict) -> str:
    """Return a table of right verdicts, with a row per fault and a column per set; list the wrong verdicts below."""
    lines = [f"| | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|"]
    wrongs = sorted({wrong(row) for found in sets.values() for row in found["rows"]})
    for each in wrongs:
        cells = [[row["right"] for row in found["rows"] if wrong(row) == each] for found in sets.values()]
        lines.append(f"| {each} | {' | '.join(f'{sum(cell)} of {len(cell)}' if cell else '-' for cell in cells)} |")
    for name, found in sets.items():
        lines += ["", f"{name}: {found['summary']} Seed {found['seed']}."]
        lines += [f"- missed: {wrong(row)}, `{row['found']['verdict']}`" for row in found["rows"] if not row["right"]]
    machines = dict.fromkeys(made_on(found["made_on"]) for found in sets.values())
    return "\n".join([*lines, "", f"Measured on {'; '.join(machines)}."])


def wrong(row: dict) -> str:
    """Name the fault in a row of drawn_faults.py."""
    drawn = row["drawn"]
    says = {None: "nothing", "straggler": "a rank at half speed", "data": "a rank's batches arrive late"}
    return says.get(drawn["kind"]) or f"a slow port, {drawn['direction']}"


def run_suite(suite: str, folder: Path, rows: Path, *flags: object) -> dict:
    """Run a suite into `folder`; return its file of rows. The page also shows surprising outcomes (exit code 1)."""
    try:
        output_of(suite, "--out", folder, "--json", rows, *flags)
    except CalledProcessError as error:
        if error.returncode != 1:
            raise
    return read(rows)


def made_on(facts: dict) -> str:
    """Describe machine, MPI library and versions."""
    libraries = [facts["mpi"]] if "mpi" in facts else []
    named = [f"{name} {facts[name]}" for name in facts if name not in ("processor", "cores", "system", "mpi")]
    return ", ".join([facts["processor"], f"{facts['cores']} cores", *libraries, *named])


def failures(part, folder: Path) -> str:
    """Run all cases, or those of --cases, under the MPI of this Python; keep the rows of other MPI libraries."""
    cases = ["--cases", part.only] if part.only else []
    return failures_block(run_suite("failure_suite.py", folder, FAILURES, *cases), part.hidden)


def failures_block(found: dict, hidden: list[str]) -> str:
    """Return a row per case and a column per launcher; cases with the same outcome everywhere share a line."""
    launchers = sorted(found["made_on"])
    lines = [f"| | {' | '.join(f'`{short(name)}`' for name in launchers)} |", "|---" * (len(launchers) + 1) + "|"]
    alike = {}
    rows = [row for row in found["rows"] if row["case"] not in hidden]
    for says, group in groupby(rows, lambda row: row["says"]):
        outcomes = {row["launcher"]: row["outcome"] for row in group}
        if len(launchers) == len(outcomes) > 1 and len(set(outcomes.values())) == 1:
            alike.setdefault(outcomes[launchers[0]], []).append(says)
        else:
            lines.append(f"| {says} | {' | '.join(outcomes.get(name, 'not run') for name in launchers)} |")
    lines += ["", *(f'* Under every launcher "{outcome}": {"; ".join(cases)}.' for outcome, cases in alike.items())]
    lines += ["", f"{found['summary']} Measured on:", ""]
    return "\n".join(lines + [f"* `{short(name)}`: {made_on(found['made_on'][name])}." for name in launchers])


def short(launcher: str) -> str:
    """Return the launcher's name; for srun, without the MPI library that its plugin implies."""
    return launcher if launcher.startswith("mpirun") else launcher.partition(" (")[0]


def pictures(part, folder: Path) -> dict[str, str]:
    """Draw each figure for a healthy run and for a sick run. This part has no block of text."""
    cases = list(dict.fromkeys(case for pair in part.pairs.values() for cases in pair for case in cases))
    run_suite("fault_suite.py", folder, folder / "rows.json", "--repeat", 1, "--cases", ",".join(cases))
    (folder / "runs").mkdir()
    for case in cases:  # a plot labels a run by its folder
        (folder / case / "1").rename(folder / "runs" / case)

    @cache
    def drawn(*names: str) -> dict:
        """Return all figures of these runs by name."""
        measured = measure_runs([read_run(folder / "runs" / name) for name in names], own_schedule)
        return figures.figures_of_run(measured[0]) if len(names) == 1 else figures.figures_of_runs(measured)

    for picture, pair in part.pairs.items():
        for health, names in zip(("healthy", "sick"), pair, strict=True):
            save(drawn(*names)[picture], FIGURES / "pictures" / f"{picture}-{health}.png")
    return {}


def save(figure, path: Path) -> None:
    """Save a figure as a small PNG with few colours."""
    path.parent.mkdir(exist_ok=True)
    with look.styled():
        figure.savefig(path, dpi=DPI, facecolor="white")
    Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def report(part, folder: Path) -> dict[str, str]:
    """Take a browser's screenshot of the top of a report. This part has no block of text."""
    run = folder / "run"
    on_hosts(part.hosts, "train.py", *part.training.split(), "--out", run)
    output_of("plot.py", run)
    picture = f"--screenshot={FIGURES / 'report.png'}"
    output_of(*part.browser.split(), f"--user-data-dir={folder / 'browser'}", picture, f"file://{run / 'report.html'}")
    return {}
