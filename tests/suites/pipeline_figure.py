"""Draw docs/figures/pipeline.png: four stages and eight microbatches under both schedules, as a timeline shows them.

python tests/suites/pipeline_figure.py [FILE]

The runs have the times of a small model of their own (tests/support/pipeline_runs.py): 30 ms for a micro-step on each
stage, messages of 0.2 ms. So the figure shows the schedules, not a machine.
"""

import argparse
import tempfile
from pathlib import Path

from scripts.prediction.run_prediction import own_schedule
from tests.support.pipeline_runs import make_shared
from traces.plots import look
from traces.plots.lanes import LANE_INCHES, draw_lanes, label_lanes, lanes_of, number_microbatches
from traces.verdict.summary import measure_runs

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "pipeline.png"
SCHEDULES = {"1f1b": "1f1b: each backward as soon as possible", "gpipe": "gpipe: all forwards first"}


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [make_shared(f"{folder}/{name}", schedule=name, noise=0.0, steps=4) for name in SCHEDULES]
    measured = measure_runs(runs, own_schedule)
    lanes = [lanes_of(one, one.times.representative(), 1) for one in measured]
    title = (
        "Both schedules have the same bubble, but 1F1B holds fewer activations",
        "4 stages, 8 microbatches: the bubble is 3/11 of the step",
    )
    inches = 2 * 4 * LANE_INCHES + 1.2
    with look.page(9, inches, *title, look.legend_handles(set().union(*(one.parts for one in lanes))), []) as figure:
        for axes, one, drawn, says in zip(figure.subplots(2, 1), measured, lanes, SCHEDULES.values(), strict=True):
            draw_lanes(axes, drawn, 4, LANE_INCHES)
            label_lanes(axes, one, LANE_INCHES)
            number_microbatches(axes, one, one.times.representative(), 1)
            axes.set_title(says, loc="left", size=9, pad=3)
            axes.set_xlabel("milliseconds", labelpad=2)
        figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=FIGURE, metavar="FILE", help="where it goes")
    main(parser.parse_args().file)
