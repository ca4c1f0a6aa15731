"""How tests are run: which of them share a process, and which may skip (conftest.py, suites/check_skips.py)."""

import json
import sys

import pytest

from tests.conftest import lane
from tests.suites import check_skips
from tests.support.skips import Skips

pytestmark = pytest.mark.any_mpi


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tests/ranks/test_zero.py::test_a_layer[3 ranks]", "3 ranks"),
        ("tests/gpu/test_gpu_waits.py::test_late[3 ranks-copies]", "3 ranks"),
        ("tests/ranks/test_x.py::test_y[5-12 ranks]", "12 ranks"),
        ("tests/suites/test_doctor.py::test_help_without_mpi", "one at a time"),
        ("tests/suites/test_slurm.py::test_a_sweep_gives_one_figure", "one at a time"),
        ("tests/unit/test_plots.py::test_one_run[4 ranks and more]", "tests/unit/test_plots.py"),
    ],
)
def test_what_shares_ranks_or_the_machine_shares_a_process(address, expected):
    assert lane(address) == expected


class Report:
    def __init__(self, nodeid, when="call", reason=None):
        self.nodeid, self.when, self.skipped = nodeid, when, reason is not None
        self.longrepr = ("test_a.py", 3, reason)


def checked(monkeypatch, tmp_path, *runs) -> None:
    """check_skips.py, after pytest runs of which each is told by its reports."""
    files = [tmp_path / f"{number}.json" for number in range(len(runs))]
    for file, reports in zip(files, runs, strict=True):
        skips = Skips(file)
        for report in reports:
            skips.pytest_runtest_logreport(report)
        skips.pytest_sessionfinish()
    monkeypatch.setattr(sys, "argv", ["check_skips.py", *map(str, files)])
    check_skips.main()


def test_what_ran_nowhere_is_an_error(monkeypatch, tmp_path, capsys):
    """But for a test that ran in another run, a file that did, and a reason that is known, for tests of that folder."""
    known = Report("tests/gpu/on_device/test_b.py::test_c", "setup", "no CuPy here: pip install ...")
    first = [Report("test_a.py::test_one", "setup"), Report("test_a.py::test_one", "call", "no pears"), known]
    second = [Report("test_a.py::test_one"), Report("test_d.py::test_two"), known]
    checked(monkeypatch, tmp_path, [*first, Report("test_d.py", "collect", "no plums")], second)
    assert capsys.readouterr().out == "    1 skipped: no CuPy here: pip install ...\n"
    with pytest.raises(SystemExit, match=r"test_a\.py::test_one: no pears"):
        checked(monkeypatch, tmp_path, first, [known])
    elsewhere = Report("tests/unit/test_b.py::test_c", "setup", "no CuPy here")
    with pytest.raises(SystemExit, match=r"tests/unit/test_b\.py::test_c: no CuPy here"):
        checked(monkeypatch, tmp_path, [elsewhere])
    assert json.loads((tmp_path / "0.json").read_text()) == {elsewhere.nodeid: "no CuPy here"}
