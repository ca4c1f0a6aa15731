"""Tests marked `ranks(1, 2, 4)` are started again under mpirun, once for each number of ranks.

Plain `pytest` does it all. As starting ranks takes longer than most tests, all selected tests for as many ranks share
one mpirun: the first of them starts it, the others find there what has become of them. Every rank runs the tests'
bodies under `python -m mpi4py`, so that a failure on one rank ends all of them with its traceback; a test that hangs
ends at a time limit, with the place where it hangs. What comes after a failed test gets another mpirun.

Under pytest-xdist (`-n 2`: make test, make check) two processes share the tests; `lane` says which stay in one process.
"""

import faulthandler
import json
import math
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import mpi4py
import pytest

from tests.support.launch import TIME_LIMIT_S, launch
from tests.support.skips import Skips

# The outer pytest must stay without MPI: a process that has started Open MPI cannot start mpirun any more.
mpi4py.rc(initialize=False, finalize=True)

SHOWN = 20_000  # characters of a failed mpirun's output
# These make virtual hosts: two at once would see each other's interfaces, and measure each other's load.
ON_VIRTUAL_HOSTS = (
    "tests/ranks/test_bench_exchange.py", "tests/suites/test_counted_bytes.py", "tests/suites/test_cut_cables.py",
    "tests/suites/test_doctor.py", "tests/suites/test_own_program.py", "tests/suites/test_slurm.py",
    "tests/suites/test_two_jobs.py", "tests/suites/test_virtual_",
)  # fmt: skip
ONE_LANE = "one at a time"


@pytest.fixture(autouse=True)
def signals_come_through():
    """What a test starts inherits which signals are blocked: a job that waits for one must not wait for ever."""
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGUSR2))


def pytest_addoption(parser):
    group = parser.getgroup("mpirun", "what tests marked `ranks` give the pytest that they start")
    group.addoption("--under-mpirun", type=int, help="this pytest is one of so many ranks")
    group.addoption("--most-ranks", type=int, default=math.inf, help="leave out tests on more, on a small machine")
    group.addoption("--outcomes", type=Path, help="where rank 0 notes each test that all ranks are through with")
    parser.addoption("--skips", type=Path, help="write there, as JSON, which tests ran and why others skipped")


def pytest_configure(config):
    if config.option.under_mpirun:
        config.pluginmanager.register(OneOfTheRanks(config.option.outcomes))
    else:
        config.pluginmanager.register(Launcher())
    if config.option.skips and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config.option.skips))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return lane(nodeid)

    config.option.loadscopereorder = False  # they are in order already
    return Lanes(config, log)


def lane(address: str) -> str:
    """Tests of one lane run in one process. For each number of ranks it is one, as they share an mpirun."""
    if ranks := re.search(r"\[(?:.*-)?(\d+ ranks)[-\]]", address):
        return ranks[1]
    if address.startswith(ON_VIRTUAL_HOSTS):
        return ONE_LANE
    return address.partition("::")[0]  # a file's, for the fixtures that it shares


def sort_by_lanes(items) -> None:
    """Begin with what waits most, for hosts, failures and commands; end with the tests on several ranks, which take all
    cores. Among those of a kind, lanes of many tests come first, so that both processes end together."""
    counts = Counter(lane(item.nodeid) for item in items)

    def place(item):
        own = lane(item.nodeid)
        is_program = own.startswith(("tests/suites/", "tests/ranks/"))
        return own != ONE_LANE, not is_program, own.endswith(" ranks"), -counts[own], own

    items.sort(key=place)


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker:
        metafunc.parametrize("rank_count", marker.args, ids="{} ranks".format)


def pytest_collection_modifyitems(config, items):
    too_many = [item for item in items if (number_of_ranks(item) or 0) > config.option.most_ranks]
    if too_many:
        config.hook.pytest_deselected(items=too_many)
        items[:] = [item for item in items if item not in too_many]
    if hasattr(config, "workerinput"):  # one of xdist's processes has that
        sort_by_lanes(items)


@pytest.fixture
def rank_count():
    """How many ranks this test runs on; set by the marker."""
    return 1


@pytest.fixture
def comm(rank_count, pytestconfig):
    """The world, checked to have as many ranks as asked for: another MPI's mpirun would start as many worlds of one."""
    if not pytestconfig.option.under_mpirun:
        return None
    from dist.world import start_mpi

    assert start_mpi().size == rank_count
    return start_mpi()


@pytest.fixture
def shared_path(comm, tmp_path):
    """One temporary folder for all ranks: rank 0's."""
    return comm.bcast(tmp_path) if comm else tmp_path


class Launcher:
    """In the pytest that a user starts: runs tests marked `ranks` under mpirun, and tells what became of them."""

    def __init__(self):
        self.outcomes = {}  # of each item that has run under mpirun: the exception to be raised, None if it passed
        self.seconds = {}  # of those that are through

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        if not pyfuncitem.get_closest_marker("ranks"):
            return None
        if pyfuncitem not in self.outcomes:
            outcomes, seconds = run_under_mpirun(self._with_its_like(pyfuncitem))
            self.outcomes |= outcomes
            self.seconds |= seconds
        if self.outcomes[pyfuncitem]:
            raise self.outcomes[pyfuncitem]
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """--durations shows what each test took: not all of them for the first, with which they were started."""
        report = yield
        if call.when == "call":
            report.duration = self.seconds.get(item, report.duration)
        return report

    def _with_its_like(self, first) -> list:
        """All that is selected for as many ranks and has not run yet."""
        selected, ranks = first.session.items, number_of_ranks(first)
        return [item for item in selected if number_of_ranks(item) == ranks and item not in self.outcomes]


def number_of_ranks(item) -> int | None:
    return item.callspec.params["rank_count"] if item.get_closest_marker("ranks") else None


def run_under_mpirun(items) -> tuple[dict, dict]:
    """What became of the first of these tests, and of those after it up to one that failed; the seconds of each."""
    ranks = number_of_ranks(items[0])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes"
        file.touch()
        # Under mpirun only Python's output is captured, so that faulthandler's goes where it can be seen.
        options = ["-x", "-q", "--capture=sys", f"--under-mpirun={ranks}", f"--outcomes={file}"]
        command = [sys.executable, "-m", "mpi4py", "-m", "pytest", *options, *map(address, items)]
        result = launch(ranks, command, time_limit_s=TIME_LIMIT_S * (1 + len(items)))
        noted = {where: said for where, *said in map(json.loads, file.read_text().splitlines())}
    known = {item: noted[address(item)] for item in items if address(item) in noted}
    outcomes = {item: reason and pytest.skip.Exception(reason) for item, (reason, _) in known.items()}
    if result.returncode or len(outcomes) < len(items):
        failed = next((item for item in items if item not in outcomes), items[-1])
        text = f"{result.stdout[-SHOWN:]}{result.stderr[-SHOWN:]}"
        outcomes[failed] = pytest.fail.Exception(f"{ranks} ranks, exit code {result.returncode}\n{text}", pytrace=False)
    return outcomes, {item: seconds for item, (_, seconds) in known.items()}


def address(item) -> str:
    """What pytest is to be given to run it."""
    return f"{item.path}::{item.nodeid.partition('::')[2]}"


class OneOfTheRanks:
    """In a pytest under mpirun: all ranks meet after each test, so it has passed on all of them, and rank 0 notes it.

    A rank whose test has failed does not come: it ends (-x), and with it all the others.
    """

    def __init__(self, outcomes: Path):
        self.outcomes, self.skipped = outcomes, None
        self._limit_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._limit_time()
        self.skipped, start = None, time.perf_counter()
        result = yield
        if not item.session.testsfailed:
            self._meet(item, start)
        return result

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.skipped = report.longrepr[2]

    def _limit_time(self) -> None:
        """Of a test, or of the end: all ranks tell where they are, and three seconds later they are ended.

        Neither needs Python, which a rank that hangs in a library may hold up.
        """
        faulthandler.dump_traceback_later(TIME_LIMIT_S, file=sys.__stderr__)
        signal.alarm(TIME_LIMIT_S + 3)

    def _meet(self, item, start: float) -> None:
        from dist.world import start_mpi

        comm = start_mpi()
        skipped = comm.allgather(self.skipped)
        assert len(set(skipped)) == 1, f"{item.name} was skipped on some ranks only: {skipped}"
        if comm.rank == 0:
            with self.outcomes.open("a") as file:
                print(json.dumps([address(item), self.skipped, time.perf_counter() - start]), file=file)
