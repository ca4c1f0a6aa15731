"""The house's limits: files and functions that can be read in one sitting, and not too many small files."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
ROOMS = ("gpt2", "dist", "traces", "strategies", "scripts")
FILES = {path.relative_to(ROOT): path.read_text() for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}
FILE_LINES, FUNCTION_LINES, SMALL_LINES = 300, 50, 60
MOST_SMALL = 32  # files shorter than SMALL_LINES, without __init__.py; this may only become less


def long_functions(text: str) -> dict[str, int]:
    """{name: lines} of a file's functions that are longer than FUNCTION_LINES, those within others too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    return {name: count for name, count in lines.items() if count > FUNCTION_LINES}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_file_and_no_function_is_too_long(path):
    assert len(FILES[path].splitlines()) <= FILE_LINES
    assert long_functions(FILES[path]) == {}


def test_few_files_are_small():
    """Strategies are left out: each is a file of its own, and a short one is a good one."""
    counted = [path for path in FILES if path.name != "__init__.py" and path.parts[0] != "strategies"]
    lines = {str(path): len(FILES[path].splitlines()) for path in counted}
    small = {path: count for path, count in lines.items() if count < SMALL_LINES}
    assert len(small) <= MOST_SMALL, f"merge some that share a subject: {small}"


def test_a_long_function_is_seen():
    body = "        pass\n" * (FUNCTION_LINES - 1)
    assert long_functions(f"class A:\n    def short(self):\n{body}") == {}
    assert long_functions(f"class A:\n    def long(self):\n{body}        pass\n") == {"long": FUNCTION_LINES + 1}
