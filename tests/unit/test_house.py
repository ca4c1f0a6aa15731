"""The line budgets of CONTRIBUTING.md: product lines (Python and CUDA) per room, and those of the tests."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)/` \| ([\d,]+) \|$", re.MULTILINE)
BUDGETS = {room: int(most.replace(",", "")) for room, most in ROW.findall((ROOT / "CONTRIBUTING.md").read_text())}


def lines_of(folder: Path) -> int:
    """Return the number of lines of all Python and CUDA sources in a folder."""
    paths = (path for suffix in ("py", "cu", "cuh") for path in folder.rglob(f"*.{suffix}"))
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_every_room_has_a_budget():
    assert set(BUDGETS) == {"gpt2", "dist", "strategies", "traces", "scripts", "tests"}


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_stays_within_its_budget(room):
    lines = lines_of(ROOT / room)
    assert lines <= BUDGETS[room], f"{room}/ has {lines} lines, {BUDGETS[room]} at most: delete something first"


def test_lines_are_counted(tmp_path):
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "a.py").write_text("one\n\ntwo\n")
    (tmp_path / "b.cu").write_text("one\n")
    (tmp_path / "b.cuh").write_text("one")
    (tmp_path / "notes.md").write_text("none\n" * 9)
    assert lines_of(tmp_path) == 5
