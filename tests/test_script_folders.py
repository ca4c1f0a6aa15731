"""What lies where in scripts/: programs at the top, what they are made of in folders by subject."""

import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
MODULES = {path: path.read_text() for path in sorted(SCRIPTS.rglob("*.py"))}
PROGRAMS = {path.stem for path in MODULES if path.parent == SCRIPTS}
FOLDERS = {path.parent.name for path in MODULES if path.name == "__init__.py"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_what_is_started_is_at_the_top(path):
    """With its launch lines; a module in a folder would not find the others. Each folder says what it is for."""
    begins, docstring = 'if __name__ == "__main__":' in MODULES[path], ast.get_docstring(ast.parse(MODULES[path]))
    assert begins == (path.parent == SCRIPTS)
    assert docstring
    assert not begins or f"scripts/{path.name}" in docstring


def test_no_folder_hides_another_module():
    """They are found by their bare names, as the programs, the tests and the standard library are."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    tests = {path.stem for path in (ROOT / "tests").iterdir()}
    assert len(FOLDERS) > 10
    assert not FOLDERS & (PROGRAMS | packages | tests | set(sys.stdlib_module_names))


def test_imports_run_downwards():
    """Between programs and folders, each of which counts as one; also those within functions."""
    TopologicalSorter(imports(MODULES)).prepare()


def imports(modules: dict[Path, str]) -> dict[str, set[str]]:
    """Which programs and folders each of them imports, by the modules' texts."""
    found = defaultdict(set)
    for path, text in modules.items():
        own = path.stem if path.parent == SCRIPTS else path.parent.name
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found[own] |= {name.partition(".")[0] for name in names} & (PROGRAMS | FOLDERS) - {own}
    return found


def test_a_circle_is_seen():
    circle = MODULES | {SCRIPTS / "machine" / "host.py": "def name():\n    import training.run\n"}
    with pytest.raises(CycleError):
        TopologicalSorter(imports(circle)).prepare()
