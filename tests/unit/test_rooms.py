"""Who may import whom: floors downwards only, by full package names; programs lie at the top of scripts/."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from strategies import STRATEGIES

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
# What each floor may import of the others. A package that nobody lists here is imported by nobody.
BELOW = {
    "gpt2": set(),
    "dist": set(),
    "traces": set(),
    "strategies": {"gpt2", "dist"},
    "scripts": {"strategies", "gpt2", "dist", "traces"},
}
SOURCES = {path.relative_to(ROOT): path.read_text() for floor in BELOW for path in sorted((ROOT / floor).rglob("*.py"))}
PROGRAMS = {path.stem for path in SOURCES if path.parts[0] == "scripts" and len(path.parts) == 2}
PATH_JUGGLERS = {Path("scripts/doctor.py")}  # it says what is missing where nothing is installed


def imported(text: str) -> set[str]:
    """The full names that a module imports, also within functions."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import: write the full package name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_run_downwards(path):
    floor = path.parts[0]
    others = {name.partition(".")[0] for name in imported(SOURCES[path])} & (BELOW.keys() | {"tests"})
    assert others <= BELOW[floor] | {floor}
    assert "sys.path" not in SOURCES[path] or path in PATH_JUGGLERS


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] == "scripts"], ids=str)
def test_programs_lie_at_the_top_and_in_makers(path):
    """With their launch lines. Each package says what it is for."""
    begins, docstring = 'if __name__ == "__main__":' in SOURCES[path], ast.get_docstring(ast.parse(SOURCES[path]))
    assert docstring
    if path.parent == Path("scripts") and path.name != "__init__.py":
        assert begins
    if begins:
        assert path.parent in (Path("scripts"), Path("scripts/makers"))
        assert str(path) in docstring


def rooms_imported(sources: dict[Path, str]) -> dict[str, set[str]]:
    """For each room of scripts/ (a program or a package), the other rooms that it imports."""
    found = defaultdict(set)
    for path, text in sources.items():
        if path.parts[0] == "scripts" and path.name != "__init__.py":
            own = path.with_suffix("").parts[1]
            names = [name.split(".") for name in imported(text)]
            found[own] |= {name[1] for name in names if name[0] == "scripts"} - {own}
    return found


def test_no_circle_between_rooms():
    TopologicalSorter(rooms_imported(SOURCES)).prepare()


def test_a_circle_is_seen():
    circle = SOURCES | {Path("scripts/machine/host.py"): "def name():\n    import scripts.training.assemble\n"}
    with pytest.raises(CycleError):
        TopologicalSorter(rooms_imported(circle)).prepare()


def test_parts_of_a_training_run_are_given_values():
    """Only plan.py and assemble.py read the settings; no other function of the room is handed them, or all parts."""
    for path, text in SOURCES.items():
        if path.parent == Path("scripts/training") and path.name not in ("assemble.py", "plan.py"):
            reads = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
            assert not {"settings", "loop"} & {owner.id for owner in reads if isinstance(owner, ast.Name)}, path
            assert "scripts.settings.training" not in text


# These mean something else as well: "none" many things, the others an MPI library's collectives and algorithms.
AMBIGUOUS = {"none", "reduce-scatter", "allreduce", "ring", "tree"}
DISTINCT = STRATEGIES.keys() - AMBIGUOUS
# What is measured for the documentation is named there, as a user names it on a command line.
MAY_NAME = ("strategies", "scripts/makers")


@pytest.mark.parametrize("path", [path for path in SOURCES if not str(path).startswith(MAY_NAME)], ids=str)
def test_nothing_else_names_a_strategy(path):
    """What others need to know of one, it declares."""
    constants = {node.value for node in ast.walk(ast.parse(SOURCES[path])) if isinstance(node, ast.Constant)}
    assert not constants & DISTINCT
