"""Figures and the table of medians of one run, or of several side by side.

    python scripts/plot.py runs/sliced
    python scripts/plot.py runs/reduce-bcast runs/sliced runs/reduce-scatter --out plots

One run: RUN/plots/ gets timeline, phases and loss. Several: --out gets comparison, phases, loss and each run's
timeline. Every figure is written as PNG and SVG.
"""

import argparse
import sys
from pathlib import Path

from traces import RunError, read_run
from traces.analysis import MeasuredRun, measure_runs, parts
from traces.ranking import table, verdict


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 where a run folder cannot be used."""
    settings = parse(arguments)
    try:
        measured = measure_runs([read_run(path) for path in settings.runs])
        for path in plot(measured, settings.out or default_folder(settings.runs)):
            print(path)
    except RunError as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        return 2
    print(report(measured))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, written by train.py --out")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help='default: RUN/plots; of several runs, "plots" beside the first'
    )
    return parser.parse_args(arguments)


def default_folder(runs: list[Path]) -> Path:
    return runs[0] / "plots" if len(runs) == 1 else runs[0].resolve().parent / "plots"


def plot(measured: list[MeasuredRun], folder: Path) -> list[Path]:
    """Draw and save all figures of the runs; returns the files' paths."""
    # Loading matplotlib takes a second, which --help and a wrong folder need not wait for.
    from traces import comparison, look, loss_curves, phase_bars, timeline

    figures = {"phases": phase_bars.draw(measured), "loss": loss_curves.draw(measured)}
    if len(measured) == 1:
        figures["timeline"] = timeline.draw(measured[0])
    else:
        figures["comparison"] = comparison.draw(measured)
        figures |= {f"timeline-{file_name(one.label)}": timeline.draw(one) for one in measured}
    return [path for name, figure in sorted(figures.items()) for path in look.save(figure, folder / name)]


def file_name(label: str) -> str:
    """A label as part of a file name: "reduce-bcast dedicated" gives reduce-bcast-dedicated."""
    return "-".join("".join(sign if sign.isalnum() or sign in "-_." else " " for sign in label).split())


def report(measured: list[MeasuredRun]) -> str:
    """The table of medians and the sentence that names the fastest."""
    runs = [one.figures for one in measured]
    return f"\n{table(runs, [parts(figures) for figures in runs])}\n\n{verdict(runs)}"


if __name__ == "__main__":
    sys.exit(main())
