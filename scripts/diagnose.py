"""Find the bottleneck of a run's steps, with the evidence and predicted step times for other strategies.

    python scripts/diagnose.py runs/sliced
    python scripts/diagnose.py runs/sliced --json
    python scripts/diagnose.py runs/sliced --start 2        the second start of a resumed run

Reads what scripts/train.py --out wrote; nothing is run or measured. --json prints one object: verdict, bottleneck,
evidence, advice. A crashed run is diagnosed as far as it got, and missing files are named. For a resumed run the
verdict covers its last start, or the one that --start selects; the `starts` lines summarize every start.
"""

import argparse
import sys
from pathlib import Path

from dist.console import open_console
from gpt2.files import as_json
from scripts.reports.verdict import as_text, diagnose
from scripts.settings.command_line import Parser
from traces import RunError, read_run


def main(arguments: list[str] | None = None) -> int:
    """Print the diagnosis. Return the exit status: 2 for an unusable run folder."""
    settings = parse(arguments)
    try:
        answer = diagnose(read_run(settings.run, allow_missing=True, start=settings.start))
    except RunError as error:
        print(f"diagnose.py: error: {error}", file=sys.stderr)
        return 2
    print(as_json(answer, indent=1) if settings.json else as_text(answer))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run folder, written by train.py --out")
    add("--json", action="store_true", help="print one object instead of text")
    add("--start", type=int, metavar="K", help="which start of a resumed run, counted from 1; default: the last")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    open_console()
    sys.exit(main())
