"""Figures and the table of medians of one run, or of several side by side.

    python scripts/plot.py runs/sliced
    python scripts/plot.py runs/reduce-bcast runs/sliced runs/reduce-scatter --out plots

One run: RUN/plots/ gets timeline, phases, ports, ranks, waits, messages and loss, and RUN/report.html the verdict, all
pictures and the tables. Several: --out gets comparison, phases, loss, model, each run's timeline and, of runs of
different size, scaling. Every figure is written as PNG and SVG. What a crashed run lacks is said, the rest is drawn.
"""

import argparse
import sys
from pathlib import Path

from dist.console import open_console
from gpt2.errors import UserError
from gpt2.files import replacing_in
from scripts.prediction.of_run import own_schedule
from scripts.reports.verdict import answer_of
from traces import RunError, read_run
from traces.verdict.headlines import headline, shown_in
from traces.verdict.summary import TimedRun, measure_runs, table, verdict


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 where a run folder cannot be used, or a file not be written."""
    settings = parse(arguments)
    try:
        measured = measure_runs([read_run(path, allow_missing=True) for path in settings.runs], own_schedule)
        of_one = len(settings.runs) == 1
        folder = settings.runs[0] if of_one else settings.runs[0].resolve().parent
        for path in plot(measured, settings.out or folder / "plots"):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, written by train.py --out")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help='default: RUN/plots; of several runs, "plots" beside the first'
    )
    return parser.parse_args(arguments)


def plot(measured: list[TimedRun], folder: Path) -> list[Path]:
    """Draw and save all figures of the runs, and one run's report; returns the files' paths."""
    # Loading matplotlib takes a second, which --help and a wrong folder need not wait for.
    from scripts.reports.figures import of_one, of_several
    from scripts.reports.html_page import write_report
    from traces.plots import look

    figures = of_one(measured[0]) if len(measured) == 1 else of_several(measured)
    with replacing_in(folder) as new:
        names = {name: look.save(figure, new / name) for name, figure in sorted(figures.items())}
    saved = {name: [folder / path.name for path in pair] for name, pair in names.items()}
    paths = [path for pair in saved.values() for path in pair]
    if len(measured) == 1:
        pictures = {name: next(path for path in pair if path.suffix == ".svg") for name, pair in saved.items()}
        (one,) = measured
        answer = answer_of(one.diagnosis)
        page, first = one.run.path / "report.html", shown_in(one.diagnosis.finding)
        paths.append(write_report(page, one.figures, answer, pictures, one.run.config, first))
    return paths


def report(measured: list[TimedRun]) -> str:
    """The table of medians; each run's verdict, in short where there are several; and which run is fastest."""
    runs = [one.figures for one in measured]
    if len(measured) == 1:
        (one,) = measured
        return f"\n{table(runs)}\n\n{one.label}: {answer_of(one.diagnosis)['verdict']}"
    verdicts = "\n".join(f"{one.label}: {headline(one.diagnosis)}" for one in measured)
    return f"\n{table(runs)}\n\n{verdicts}\n\n{verdict(runs)}"


if __name__ == "__main__":
    open_console()
    sys.exit(main())
