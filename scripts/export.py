"""A run for the tools of others.

    python scripts/export.py runs/sliced --format paraver --out sliced.prv      with sliced.pcf and sliced.row beside it
    python scripts/export.py runs/sliced --format perfetto --out sliced.json.gz for ui.perfetto.dev, chrome://tracing

A name that ends in .gz is compressed.
"""

import argparse
import sys
from pathlib import Path

from traces import RunError, chrome, paraver, read_run


def export_paraver(run: Path, out: Path) -> list[Path]:
    return paraver.export(read_run(run, allow_missing=True), out)


def export_perfetto(run: Path, out: Path) -> list[Path]:
    return chrome.export(read_run(run, allow_missing=True), out)


# (run folder, --out) -> the paths written
FORMATS = {"paraver": export_paraver, "perfetto": export_perfetto}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 where the run cannot be used or the file not be written."""
    settings = parse(arguments)
    try:
        paths = FORMATS[settings.format](settings.run, settings.out)
    except RunError as error:
        print(f"export.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"export.py: error: {settings.out} cannot be written ({error}); choose another --out", file=sys.stderr)
        return 2
    for path in paths:
        print(path)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, written by train.py --out")
    parser.add_argument("--format", choices=FORMATS, required=True, help="what to write")
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="where to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
