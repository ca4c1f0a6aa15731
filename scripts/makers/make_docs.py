"""Run the programs that docs/ shows, and write figures, tables and numbers from their results.

    python scripts/makers/make_docs.py PART...

Each part replaces the text between its marks, and its figures in docs/figures. pages/parts.toml says what each part
runs.
"""

import argparse
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

from dist.console import open_console
from scripts.makers.pages import faults, less_traffic, outputs, port_figures
from scripts.makers.pages.page import replace_block

PARTS = tomllib.loads((Path(__file__).parent / "pages" / "parts.toml").read_text())


def main():
    options = parse()
    for name in options.parts:
        part = SimpleNamespace(**PARTS[name], name=name, only=options.cases)
        with tempfile.TemporaryDirectory() as folder:
            made = function_of(name)(part, Path(folder))
        for block, text in ({name: made} if isinstance(made, str) else made).items():
            replace_block(part.page, block, text)


def parse():
    listed = "\n".join(f"    {name:<20} {part['takes']}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--cases", metavar="NAME,...", help="failures: run only these, keep the rows of others (all)")
    return parser.parse_args()


def function_of(name: str):
    """Return the part's function of (part, a new folder), which returns the block's text, or {block: text}."""
    function = PARTS[name].get("function", name)
    modules = (outputs, faults, port_figures, less_traffic)
    return next(getattr(module, function) for module in modules if hasattr(module, function))


if __name__ == "__main__":
    open_console()
    main()
