"""Run the programs that docs/ shows, and write figures, tables and numbers from their results.

    python scripts/makers/make_docs.py PART...
    python scripts/makers/make_docs.py learning --text tinyshakespeare.txt

Each part replaces the text between its marks, and its figures in docs/figures. pages/parts.toml says what each part
runs, and the text around its numbers.
"""

import argparse
import tempfile
import tomllib
from importlib import import_module
from pathlib import Path

from dist.console import open_console
from scripts.makers.pages.page import FIGURES, Part, replace_block

PARTS = tomllib.loads((Path(__file__).parent / "pages" / "parts.toml").read_text())


def main():
    options = parse()
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        part = Part(**PARTS[name], name=name, options=options)
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
    parser.add_argument("--text", type=Path, help="learning: tinyshakespeare.txt (1,115,394 bytes)")
    parser.add_argument("--pythons", nargs="+", metavar="PYTHON", help="strategies: with the MPI of each")
    parser.add_argument("--cases", metavar="NAME,...", help="failures: run only these, keep the rows of others (all)")
    options = parser.parse_args()
    if "learning" in options.parts and not options.text:
        parser.error("learning needs --text, the path of tinyshakespeare.txt")
    return options


def function_of(name: str):
    """Return the part's function of (part, a new folder), which returns the block's text, or {block: text}."""
    part = PARTS[name]
    return getattr(import_module(f"scripts.makers.pages.{part['in']}"), part.get("function", name))


if __name__ == "__main__":
    open_console()
    main()
