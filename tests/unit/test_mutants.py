"""tests/suites/mutants.py: its list still fits the code, and it tells what a fault does to the tests."""

from collections import Counter
from pathlib import Path

import pytest

from tests.suites.mutants import LIST, ROOT, Copy, Fault, add, read_list, run_all, write_list

FAULTS = read_list(LIST)


@pytest.mark.parametrize("path", sorted({fault.path for fault in FAULTS}))
def test_every_fault_applies(path):
    """Whoever changes a line that has one changes the fault, or takes it out where there is nothing to go wrong."""
    assert [problem for fault in FAULTS if fault.path == path and (problem := fault.problem(ROOT))] == []


def test_the_list_covers_all_rooms():
    assert len(FAULTS) >= 150
    assert len(set(FAULTS)) == len(FAULTS)
    rooms = Counter(fault.path.partition("/")[0] for fault in FAULTS)
    assert min(rooms[room] for room in ("gpt2", "dist", "strategies", "traces", "scripts")) >= 5
    assert sum(bool(fault.equivalent) for fault in FAULTS) <= 3


def test_lists_are_joined_and_written_as_they_were_read(tmp_path):
    more = Fault("dist/world.py", "a", "", ("tests/unit/test_rooms.py",), "nobody asks")
    write_list(tmp_path / "list.json", joined := add(FAULTS, [more, FAULTS[0]]))
    assert read_list(tmp_path / "list.json") == joined
    assert len(joined) == len(FAULTS) + 1
    assert [fault.path for fault in joined] == sorted(fault.path for fault in joined)


CODE = "def double(x):\n    while x < 0:\n        x += 1\n    return 2 * x\n"
TESTS = "from gpt2 import double\n\n\ndef test_double():\n    assert double(-3) == 0\n"


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "__init__.py").write_text(CODE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    return tmp_path


def fault(old, new):
    return Fault("gpt2/__init__.py", old, new, ("tests/test_it.py",))


def test_what_is_noticed_what_hangs_and_what_survives(tree):
    faults = [fault("x < 0", "x < 1"), fault("x += 1", "x += 0"), fault("2 * x", "3 * x")]
    told = []
    outcomes = run_all(tree, faults, 2, 8.0, told.append)
    assert [one.killed_by for one in outcomes] == ["tests/test_it.py::test_double", "the time limit", ""]
    assert sorted(map(str, told)) == sorted(map(str, outcomes))
    assert (tree / "gpt2" / "__init__.py").read_text() == CODE


def test_tests_that_fail_anyway_prove_nothing(tree):
    (tree / "tests" / "test_it.py").write_text(TESTS.replace("== 0", "== 1"))
    with pytest.raises(SystemExit, match="this fails already: tests/test_it"):
        run_all(tree, [fault("x < 0", "x < 1")], 1, 30.0, print)


def test_a_fault_of_the_same_length_in_the_same_second_is_seen(tree, tmp_path_factory):
    """Python would take what it compiled before for current."""
    copy = Copy(tree, tmp_path_factory.mktemp("copy"))
    assert copy.run(("tests/test_it.py",), 30.0)[0] == ""
    with copy.having(fault("x < 0", "x < 1")):
        assert copy.run(("tests/test_it.py",), 30.0)[0] == "tests/test_it.py::test_double"
    assert copy.run(("tests/test_it.py",), 30.0)[0] == ""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("x", "y", "stands there 4 times, expected once"),
        ("triple", "double", "stands there 0 times, expected once"),
        ("2 * x", "2 *", "it is no Python"),
        ("2 * x", "2 * x", "it changes nothing"),
    ],
)
def test_a_fault_that_does_not_apply_is_told(old, new, problem, tree):
    assert problem in fault(old, new).problem(tree)
    lost = Fault("gpt2/__init__.py", "2 * x", "3 * x", ("tests/test_it.py::test_triple",))
    assert lost.problem(tree) == "no test tests/test_it.py::test_triple"
    assert "no test is named" in Fault("gpt2/__init__.py", "2 * x", "3 * x", ()).problem(tree)
    assert "stands there 0 times" in Fault("gpt2/gone.py", "a", "b", ()).problem(Path(tree))
