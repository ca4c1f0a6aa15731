"""What becomes of a run when something fails: every case of faults/ under mpirun and srun, and then resumed.

    sudo python tests/suites/failure_suite.py --out runs/failures --json failures.json
    sudo python tests/suites/failure_suite.py --out runs/failures --cases killed,raises --launchers srun

Three virtual hosts of one rank each, under the launchers of this Python's MPI. When a run has made 35 of its 100 steps,
a checkpoint after every tenth, the fault happens; it is recorded whether and when the job ends, how, what it says, and
how far the newest complete checkpoint is behind the log. Then what was broken is mended and the same run started again
with --resume: it is to end with the losses of a run that nobody disturbed, bit for bit, and to leave nothing half
written. --json: rows of the same case and launcher are replaced in the file, others stay.

Each case says what it expects. Exit code 1: a row is not as expected; 2: it could not be made.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from scripts.cluster.hosts import ClusterError
from scripts.machine.host import machine, versions
from tests.suites.faults.case import FAULT_STEP, Case, Scene, data_folder, nothing
from tests.suites.faults.cases import CASES
from tests.suites.faults.disk import own_disk
from tests.suites.faults.folder_cases import FOLDER_CASES, write_data
from tests.suites.faults.launchers import launchers
from tests.suites.faults.log import MARK, OF_THE_JOB, curve, last_step, message, newest_step, skipped_steps, starts_of
from tests.suites.faults.outcome import judge, outcome, summary
from tests.suites.faults.processes import rank_processes, wait_until
from tests.suites.faults.suite import RowsFile, suite_parser
from tests.suites.faults.supervised_cases import SUPERVISED_CASES

SUITES = Path(__file__).parent
SCRIPTS = SUITES.parents[1] / "scripts"
TRAINING = (
    "--n-layer", 2, "--n-head", 2, "--n-embd", 64, "--context", 32, "--batch-size", 4, "--threads", 1,
    "--steps", 100, "--checkpoint-every", 10, "--eval-every", 0, "--end-on-stall", "--stall-after", 5,
)  # fmt: skip
START_LIMIT_S, END_LIMIT_S, GONE_LIMIT_S = 120, 60, 15
LOCK = "lock.json"
HALF_WRITTEN = ("checkpoints/*.part", "checkpoints/.*", ".*.tmp", "lock*")
SETTING = (
    "Three virtual hosts of one rank each, `--steps 100 --checkpoint-every 10 --end-on-stall --stall-after 5`, the "
    f"fault in step {FAULT_STEP}."
)
ALL = CASES | FOLDER_CASES | SUPERVISED_CASES


def main():
    arguments = parse()
    file = RowsFile(arguments.json, "launcher", ALL, lambda rows: f"{summary(rows)} {SETTING}")
    try:
        rows = list(all_rows(arguments, file))
    except ClusterError as error:
        give_up(str(error))
    wrong = [f"{row['case']} ({row['launcher']})" for row in rows if row["wrong"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as expected{'; not: ' if wrong else ''}{', '.join(wrong)}")
    raise SystemExit(1 if wrong else 0)


def all_rows(arguments, file: RowsFile):
    """Each row as soon as it is made; the file has it then."""
    for launcher, make in suites(arguments):
        suite = None
        for name in arguments.cases:
            if launcher.startswith("mpirun") or not ALL[name].supervised:
                suite = suite or make()
                row = suite.row(name, ALL[name])
                print(line(row), flush=True)
                file.put(row, launcher, suite.made_on())
                yield row


def suites(arguments):
    """(launcher, what makes its suite) of those that are asked for."""
    available, out = launchers(), arguments.out.absolute()
    for launcher in available:
        if launcher.startswith(arguments.launchers):
            folder = out / re.sub(r"\W+", "-", launcher)
            yield launcher, lambda launcher=launcher, folder=folder: Suite(launcher, available[launcher], folder)


def parse():
    parser = suite_parser(__doc__, "DIR/LAUNCHER/CASE", ALL)
    parser.add_argument("--launchers", default="", metavar="NAME", help="mpirun or srun (all)")
    return parser.parse_args()


class Suite:
    """One launcher's cases, in a folder, beside the run that nobody disturbs."""

    def __init__(self, launcher: str, hosts, folder: Path):
        self._launcher, self._hosts, self._folder = launcher, hosts, folder
        self._curves = {}
        folder.mkdir(parents=True, exist_ok=True)

    def row(self, name: str, case: Case) -> dict:
        """Run the case, resume it, and say what became of it."""
        expected, start_s = self._undisturbed(case)
        run = self._folder / name
        self._begin(run, case)
        with own_disk(run / case.disk) if case.disk else nullcontext():
            facts = self._failed(run, case, expected) | {"case": name, "says": case.says, "launcher": self._launcher}
            case.heal(run)
            case.afterwards(run)
            facts |= self._resumed(run, case, expected)
            facts |= {"found": case.check(run), "start_s": start_s}
            return in_words(facts, case)

    def _begin(self, run: Path, case: Case) -> None:
        """Nothing is there of an earlier row, and the data are."""
        shutil.rmtree(run, ignore_errors=True)
        run.with_suffix(".txt").unlink(missing_ok=True)
        if any("{data}" in str(word) for word in case.strategy):
            write_data(run)

    def made_on(self) -> dict:
        """Machine and versions, once there is a row."""
        config = json.loads(next(self._folder.glob("*/config.json")).read_text())
        return machine() | {"mpi": config["mpi_library"]} | versions("numpy", "mpi4py")

    def _undisturbed(self, case: Case) -> tuple[list[tuple], float]:
        """(the curve of a run to which nothing happens, seconds until it had made its first step)."""
        key = re.sub(r"\W+", "-", f"{' '.join(map(str, case.strategy))} {case.ranks}")
        run = self._folder / key
        output, took = run.with_suffix(".txt"), run.with_suffix(".start")
        if not took.exists():
            self._begin(run, case)
            with self._hosts() as cluster:
                process, started = cluster.start(train_command(run, case), output, case.ranks), time.time()
                wait_until(lambda: last_step(run) or process.poll() is not None, START_LIMIT_S)
                start_s = time.time() - started
                if process.wait(START_LIMIT_S + END_LIMIT_S):
                    give_up(f"{run}: {words(run)[-2000:]}")
            took.write_text(f"{start_s:.2f}")
        if key not in self._curves:
            self._curves[key] = curve(run), float(took.read_text())
        return self._curves[key]

    def _failed(self, run: Path, case: Case, expected: list[tuple]) -> dict:
        """What became of the job."""
        output = run.with_suffix(".txt")
        with self._hosts() as cluster:
            scene = Scene(run, cluster, train_command(run, case), case.ranks)
            case.before(scene)
            started = time.time()
            start = cluster.start_supervised if case.supervised else cluster.start
            process = start(broken_command(run, case), output, case.ranks)
            began = self._provoke(case, scene, process, started)
            ended = wait_until(lambda: process.poll() is not None, case.limit_s)
            seconds = time.time() - began
            wait_until(lambda: not rank_processes(run), GONE_LIMIT_S)
            survivors, gone = list(rank_processes(run)), time.time() - began
            facts = {"ended": bool(ended), "seconds": round(seconds, 2), "code": process.poll()}
            facts |= {"survivors": survivors, "gone_s": round(gone, 2), "second": scene.second}
        step, checkpoint = last_step(run), newest_step(run)
        return facts | {
            "went_on": step == len(expected), "last_step": step, "checkpoint": checkpoint,
            "message": expected_line(case, output) or message(output), "skipped": skipped_steps(run),
            "half_written": half_written(run), "stale": step < len(expected) and (run / "summary.json").exists(),
            "began": bool(step) or case.before is nothing,
            "starts": starts_of(run) if case.supervised else 1,
        }  # fmt: skip

    def _provoke(self, case: Case, scene: Scene, process, started: float) -> float:
        """Returns when it has begun, with the moment."""
        output = scene.run.with_suffix(".txt")
        if case.inside:
            wait_until(lambda: MARK in output.read_text() or process.poll() is not None, START_LIMIT_S)
            started = fault_time(output)
        if case.provoke is nothing:
            return started
        if case.at_start:
            wait_until(lambda: len(scene.ranks()) == case.ranks, START_LIMIT_S)
        else:
            self._wait_for_fault_step(scene.run, process)
        began = time.time()
        case.provoke(scene)
        return began

    def _wait_for_fault_step(self, run: Path, process) -> None:
        wait_until(lambda: last_step(run) >= FAULT_STEP or process.poll() is not None, START_LIMIT_S)
        if last_step(run) < FAULT_STEP:
            give_up(f"{run} did not come so far: {words(run)[-2000:]}")

    def _resumed(self, run: Path, case: Case, expected: list[tuple]) -> dict:
        """The same, started again as it should have been from the first, with --resume."""
        output = run.with_suffix(".resumed.txt")
        output.unlink(missing_ok=True)
        with self._hosts() as cluster:
            over = ["--take-over"] if case.take_over and (run / LOCK).exists() else []
            process = cluster.start([*train_command(run, case), "--resume", *over], output, case.ranks)
            try:
                code = process.wait(START_LIMIT_S + END_LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
        text = output.read_text()
        at = re.search(r"continues from step (\d+)", text)
        return {
            "resumed_code": code, "resumed_from": int(at[1]) if at else 0, "resumed_message": message(output),
            "same": code == 0 and curve(run) == expected, "left_over": half_written(run),
        }  # fmt: skip


def train_command(run: Path, case: Case, program: tuple = (SCRIPTS / "train.py",), flags: tuple = ()) -> list[str]:
    """What each rank runs of a run that nobody disturbs."""
    words = [sys.executable, *program, *TRAINING, *flags, "--strategy", *case.strategy, "--out", run]
    return [str(word).replace("{data}", str(data_folder(run))) for word in words]


def broken_command(run: Path, case: Case) -> list[str]:
    """What each rank runs where something is to fail."""
    program = (SUITES / "failure_train.py", case.inside) if case.inside else (SCRIPTS / "train.py",)
    return [*case.command, *train_command(run, case, program, case.flags)]


def give_up(text: str):
    print(f"failure_suite.py: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def words(run: Path) -> str:
    return run.with_suffix(".txt").read_text()


def fault_time(output: Path) -> float:
    """When failure_train.py says that it failed."""
    text = output.read_text()
    found = re.search(rf"{MARK} ([\d.]+)", text)
    if not found:
        give_up(f"{output} does not say when the fault was: {text[-2000:]}")
    return float(found[1])


def expected_line(case: Case, output: Path) -> str:
    """The line of a job's output that the case expects; "" where there is none."""
    if not case.line or case.second is not None:
        return ""
    text = output.read_text(errors="replace").replace("\0", "")  # which Open MPI's mpirun leaves
    lines = text.replace(str(output.with_suffix("")), "RUN").splitlines()
    return next((each for each in lines if re.search(case.line, each)), "")


def in_words(row: dict, case: Case) -> dict:
    """The row, with what docs/failures.md shows: outcome, what is wrong, the line that says it, and whose that is."""
    said = row["message"] if case.line else row["resumed_message"] or row["message"]
    said = row["second"]["message"] if row["second"] else said
    said_by = "job" if re.search(OF_THE_JOB, said) else "launcher" if said else ""
    row |= {"said": said, "said_by": said_by}
    row |= {"wrong": judge(row, case)}
    return row | {"outcome": outcome(row)}


def half_written(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for pattern in HALF_WRITTEN for path in run.glob(pattern))


def line(row: dict) -> str:
    parts = [f"{row['launcher']:<26} {row['case']:<16} {row['outcome']}", *row["left_over"], row["said"]]
    return "  ".join(part for part in parts if part)


if __name__ == "__main__":
    main()
