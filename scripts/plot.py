"""Draw figures and print the table of medians of one run, or of several runs side by side.

    python scripts/plot.py runs/sliced
    python scripts/plot.py runs/reduce-bcast runs/sliced runs/reduce-scatter --out plots
    python scripts/plot.py --rounds 2 runs/ring runs/tree runs/ring-again runs/tree-again

One run: RUN/plots/ gets timeline, phases, ports, ranks, waits, messages, loss and whole-run; RUN/report.html contains
the verdict, all figures and the tables. With --out DIR everything goes into DIR. Several runs: DIR gets comparison,
phases, loss, model, each run's timeline and, for runs of different size, scaling. Every figure is written as PNG and
SVG. A crashed run is drawn as far as it got, and missing files are named.
"""

import argparse
import sys
from pathlib import Path

from dist.console import open_console
from gpt2.errors import UserError
from gpt2.files import replacing_in
from scripts.prediction.run_prediction import own_schedule
from scripts.reports.verdict import answer_of
from scripts.settings.command_line import Parser
from traces import RunError, read_run
from traces.read.runs import Run
from traces.verdict.curves import compare_curves
from traces.verdict.ranking import grounds, merge_rounds, verdict
from traces.verdict.summary import TimedRun, measure_runs, table
from traces.verdict.titles import shown_in


def main(arguments: list[str] | None = None) -> int:
    """Draw and report. Return the exit status: 2 if a run folder is unusable or a file cannot be written."""
    settings = parse(arguments)
    try:
        runs = [read_run(path, allow_missing=True, start=settings.start) for path in settings.runs]
        measured = measure_rounds(runs, settings.rounds) if settings.rounds > 1 else measure_runs(runs, own_schedule)
        folder = settings.runs[0] if len(measured) == 1 else settings.runs[0].resolve().parent
        page = (settings.out or settings.runs[0]) / "report.html"
        for path in plot(measured, settings.out or folder / "plots", page):
            print(path)
    except (RunError, UserError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        return 2
    for one in measured:
        for text in one.run.missing:
            print(f"plot.py: {text}", file=sys.stderr)
    print(report(measured))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, written by train.py --out")
    out = 'folder for all output (RUN/plots and RUN/report.html; for several runs "plots" beside the first)'
    add("--out", metavar="DIR", type=Path, help=out)
    rounds = "the runs are R rounds of the same strategies, one round after another: show each strategy once, with "
    add("--rounds", metavar="R", type=int, default=1, help=f"{rounds}median and spread of its rounds (1)")
    which = "start of a resumed run, counted from 1 (the last); drawn into RUN/plots/start-K, or --out"
    add("--start", metavar="K", type=int, help=which)
    settings = parser.parse_args(arguments)
    if settings.rounds < 1:
        parser.error(f"--rounds {settings.rounds}: expected 1 or more")
    if settings.start is not None:
        if len(settings.runs) > 1:
            parser.error(f"--start {settings.start}: expected one RUN, {len(settings.runs)} were given")
        settings.out = settings.out or settings.runs[0] / "plots" / f"start-{settings.start}"
    return settings


def measure_rounds(runs: list[Run], rounds: int) -> list[TimedRun]:
    """Merge each run of the first round with its repetitions. Raise UserError if a round lacks a run."""
    count, rest = divmod(len(runs), rounds)
    if rest:
        raise UserError(f"{len(runs)} runs are not {rounds} rounds of the same strategies; give as many of each")
    merged = []
    for place, first in enumerate(measure_runs(runs[:count], own_schedule)):
        its = runs[place::count]
        labels = dict.fromkeys([first.label, *(run.label for run in its if run.label != its[0].label)])
        label = " or ".join(labels)  # auto may have chosen differently
        merged.append(merge_rounds(measure_runs(its, own_schedule), label))
    return merged


def plot(measured: list[TimedRun], folder: Path, page: Path) -> list[Path]:
    """Draw all figures of the runs into the folder and, for one run, its report as `page`. Return the files' paths."""
    # Loading matplotlib takes a second, which --help and a wrong folder need not wait for.
    from scripts.reports.figures import figures_of_run, figures_of_runs
    from scripts.reports.html_page import write_report
    from traces.plots import look

    figures = figures_of_run(measured[0]) if len(measured) == 1 else figures_of_runs(measured)
    with replacing_in(folder) as new:
        names = {name: look.save(figure, new / name) for name, figure in sorted(figures.items())}
    saved = {name: [folder / path.name for path in pair] for name, pair in names.items()}
    paths = [path for pair in saved.values() for path in pair]
    if len(measured) == 1:
        pictures = {name: next(path for path in pair if path.suffix == ".svg") for name, pair in saved.items()}
        (one,) = measured
        answer = answer_of(one.diagnosis)
        first = shown_in(one.diagnosis.finding)
        paths.append(write_report(page, one.figures, answer, pictures, one.run.config, first))
    return paths


def report(measured: list[TimedRun]) -> str:
    """Return the table of medians and the run's verdict.

    For several runs, return each verdict in short, whether the losses agree, the fastest run and why it is fastest."""
    runs = [one.figures for one in measured]
    if len(measured) == 1:
        (one,) = measured
        return f"\n{table(runs)}\n\n{one.label}: {answer_of(one.diagnosis)['verdict']}"
    verdicts = "\n".join(f"{one.label}: {one.diagnosis.finding.headline}" for one in measured)
    curves = compare_curves(measured)
    learned = f"{curves.sentence}\n" if curves else ""
    ranked = ". ".join(filter(None, (verdict(runs), grounds(runs))))
    return f"\n{table(runs)}\n\n{verdicts}\n\n{learned}{ranked}"


if __name__ == "__main__":
    open_console()
    sys.exit(main())
