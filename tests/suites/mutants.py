"""Faults put into the code one at a time, and whether a test notices each: what survives shows where tests are blind.

    python tests/suites/mutants.py                                  # all of mutants.json
    python tests/suites/mutants.py --only gpt2/optimizer            # those whose path or text has this in it
    python tests/suites/mutants.py --add more.json                  # takes another list's faults into mutants.json

mutants.json is a list of objects, one a line: `path`; `old`, a text that stands once in that file; `new`, what the
fault makes of it; `tests`, files or node ids that are to notice it, the quickest first. A fault that nobody could see
has its reason as `equivalent`, and is not run.

Faults are made in copies of the tree, and the same tests run without them first: what fails then proves nothing.
A test that hangs has noticed. The exit code is 1 if a fault survives, 2 if the list is wrong.
"""

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.json")
SHARED = "shared"
COPIED = ("gpt2", "dist", "strategies", "traces", "scripts", "tests", "docs", "pyproject.toml", "README.md")
COMPILED = "gpt2/kernels/numpy/"  # the folder of what numba compiles, and keeps on disk
LIMIT_S, LONGEST_S, ENDING_S = 120.0, 3600.0, 3.0  # of one fault's tests; of all without a fault; to end in peace
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A line of the list."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def problem(self, root: Path) -> str | None:
        """Why it does not apply to the tree as it is now; None if it does."""
        file = root / self.path
        count = file.read_text().count(self.old) if file.is_file() else 0
        if count != 1:
            return f"{self.old!r} stands there {count} times, expected once"
        try:
            if file.suffix == ".py":
                ast.parse(self.applied(root))
        except SyntaxError as error:
            return f"with {self.new!r} it is no Python: {error.msg}"
        if self.old == self.new:
            return "it changes nothing"
        if not self.tests:
            return f"no test is named that is to notice {self.new!r}"
        return next((f"no test {test}" for test in self.tests if not _is_there(root, test)), None)

    def applied(self, root: Path) -> str:
        """The file's text with the fault in it."""
        return (root / self.path).read_text().replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.path}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split()) or '(left out)'}"


@dataclass(frozen=True)
class Outcome:
    """killed_by: the test that failed, "the time limit", or "" of a survivor."""

    fault: Fault
    killed_by: str
    seconds: float


def read_list(path: Path) -> list[Fault]:
    return [Fault(**row | {"tests": tuple(row["tests"])}) for row in json.loads(path.read_text())]


def write_list(path: Path, faults: list[Fault]) -> None:
    """One fault a line, file by file."""
    rows = [{name: value for name, value in asdict(fault).items() if value != ""} for fault in faults]
    for row, fault in zip(rows, faults, strict=True):
        row["new"] = fault.new
    lines = [json.dumps({name: row[name] for name in asdict(faults[0]) if name in row}) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def add(own: list[Fault], others: list[Fault]) -> list[Fault]:
    """Both, file by file. Of a fault that is in both the other list says which tests are to notice it."""
    places = {(fault.path, fault.old, fault.new): fault for fault in [*own, *others]}
    return sorted(places.values(), key=lambda fault: fault.path)


def _is_there(root: Path, test: str) -> bool:
    path, *names = re.sub(r"\[.*", "", test).split("::")
    text = (root / path).read_text() if (root / path).is_file() else None
    return text is not None and all(f"def {name}(" in text or f"class {name}" in text for name in names)


class Copy:
    """A copy of the tree, in which one fault at a time is made and its tests are run."""

    def __init__(self, root: Path, folder: Path):
        self.folder = folder
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name)  # numba's and Python's caches too: they save minutes
            elif (root / name).exists():
                shutil.copy2(root / name, folder / name)
        beside = folder.parent / SHARED  # where tests look for texts and vocabularies
        if (root.parent / SHARED).is_dir() and not beside.exists():
            with suppress(FileExistsError):
                beside.symlink_to((root.parent / SHARED).resolve())

    @contextmanager
    def having(self, fault: Fault):
        file = self.folder / fault.path
        text, status = file.read_bytes(), file.stat()
        changed = fault.applied(self.folder)
        # Python takes compiled code for current by the second of the change, and the size.
        Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)
        file.write_text(changed)
        try:
            yield
        finally:
            file.write_bytes(text)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(self, tests: tuple[str, ...], limit_s: float, compiles: bool = False) -> tuple[str, float]:
        """(the first test that failed, "the time limit" or "" if all pass; seconds).

        compiles: what numba compiles belongs to this run alone, as a loop has the fault.
        """
        environment = os.environ | {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            if compiles:
                environment["NUMBA_CACHE_DIR"] = folder
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
            command += ["--basetemp", f"{folder}/pytest"]
            code, output = limited(command, limit_s, cwd=self.folder, env=environment)
        seconds = time.monotonic() - begun
        if code is None:
            return "the time limit", seconds
        found = FAILED.search(output)
        return (found[1] if found else f"exit code {code}") if code else "", seconds


def limited(command: list[str], limit_s: float, **options) -> tuple[int | None, str]:
    """(exit code, None where it had to be ended; what it printed). With it end the processes that it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, **options
        )
        code = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # mpirun passes it on to its ranks
            time.sleep(ENDING_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def check_imports(copy: Copy) -> None:
    """SystemExit if tests in the copy would import another tree's packages."""
    program = "import gpt2; print(gpt2.__file__)"
    environment = os.environ | {"PYTHONPATH": str(copy.folder)}
    code, output = limited([sys.executable, "-c", program], 60, cwd=copy.folder, env=environment)
    if code or not Path(output.strip()).is_relative_to(copy.folder):
        raise SystemExit(f"{copy.folder}: tests there import {output.strip()}: faults would not be seen")


def run_all(root: Path, faults: list[Fault], jobs: int, limit_s: float, tell) -> list[Outcome]:
    """Each fault's outcome; tell(outcome) as it comes. SystemExit where tests fail without any fault."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(root, Path(folder) / f"{number}"))

        def in_a_copy(work):
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        def try_out(copy, fault):
            with copy.having(fault):
                outcome = Outcome(fault, *copy.run(fault.tests, limit_s, fault.path.startswith(COMPILED)))
            tell(outcome)
            return outcome

        in_a_copy(check_imports)
        tests = sorted({test for fault in faults for test in fault.tests})
        shares = [tuple(tests[job::jobs]) for job in range(min(jobs, len(tests)))]
        failed = [
            by for by, _ in pool.map(lambda some: in_a_copy(lambda copy: copy.run(some, LONGEST_S)), shares) if by
        ]
        if failed:
            raise SystemExit(f"error: without any fault this fails already: {', '.join(failed)}: mend it first")
        return list(pool.map(lambda fault: in_a_copy(lambda copy: try_out(copy, fault)), faults))


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="the faults in whose path, text or tests it stands")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="so many at once (2)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help="seconds that a fault's tests may take"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of each fault there")
    parser.add_argument("--add", type=Path, metavar="FILE", help="take its faults into the list, and end")
    given = parser.parse_args(arguments)
    faults = read_list(LIST)
    if given.add:
        write_list(LIST, add(faults, read_list(given.add)))
        return 0
    chosen = [fault for fault in faults if given.only in f"{fault} {fault.old} {' '.join(fault.tests)}"]
    wrong = {fault: problem for fault in chosen if (problem := fault.problem(ROOT))}
    for fault, problem in wrong.items():
        print(f"does not apply: {fault.path}: {problem}", file=sys.stderr)
    tried = [fault for fault in chosen if fault not in wrong and not fault.equivalent]
    begun = time.monotonic()

    def tell(outcome):
        verdict = f"killed by {outcome.killed_by}" if outcome.killed_by else "SURVIVED"
        print(f"{outcome.seconds:5.1f} s  {outcome.fault}\n         {verdict}", flush=True)

    outcomes = run_all(ROOT, tried, given.jobs, given.limit, tell)
    survivors = [outcome.fault for outcome in outcomes if not outcome.killed_by]
    equivalent = [fault for fault in chosen if fault.equivalent]
    print(
        f"\n{len(outcomes)} faults in {time.monotonic() - begun:.0f} s: {len(outcomes) - len(survivors)} killed, ",
        end="",
    )
    print(f"{len(survivors)} survived; {len(equivalent)} more are equivalent; {len(wrong)} do not apply")
    for fault in survivors:
        print(f"survived: {fault}\n          {' '.join(fault.tests)}")
    for fault in equivalent:
        print(f"equivalent: {fault}\n            {fault.equivalent}")
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 2 if wrong else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
