"""What becomes of a run when something fails: every case of faults/cases.py under mpirun and srun, and then resumed.

    sudo python tests/suites/failure_suite.py --out runs/failures --json failures.json
    sudo python tests/suites/failure_suite.py --out runs/failures --cases killed,raises --launchers srun

Three virtual hosts of one rank each, under the launchers of this Python's MPI. When a run has made 35 of its 100 steps,
a checkpoint after every tenth, the fault happens; it is recorded whether and when the job ends, how, what it says, and
how far the newest complete checkpoint is behind the log. Then what was broken is mended and the same run started again
with --resume: it is to end with the losses of a run that nobody disturbed, bit for bit, and to leave nothing half
written. --json: rows of the same case and launcher are replaced in the file, others stay.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from scripts.cluster.hosts import ClusterError
from scripts.machine.host import machine, versions
from tests.suites.faults.cases import CASES, FAULT_STEP, Case, Scene
from tests.suites.faults.launchers import launchers
from tests.suites.faults.log import MARK, curve, last_step, newest_step, skipped_steps
from tests.suites.faults.outcome import outcome, summary
from tests.suites.faults.processes import rank_processes, wait_until
from tests.suites.faults.suite import RowsFile, suite_parser

SUITES = Path(__file__).parent
SCRIPTS = SUITES.parents[1] / "scripts"
TRAINING = (
    "--n-layer", 2, "--n-head", 2, "--n-embd", 64, "--context", 32, "--batch-size", 4, "--threads", 1,
    "--steps", 100, "--checkpoint-every", 10, "--eval-every", 0, "--end-on-stall", "--stall-after", 5,
)  # fmt: skip
START_LIMIT_S, END_LIMIT_S, GONE_LIMIT_S = 120, 60, 15
DISK = "size=8m"
HALF_WRITTEN = ("checkpoints/*.part", "checkpoints/.*", ".*.tmp")
# Lines that say who, where, what: the job's own, which are looked for first, and those of the launchers.
OF_THE_JOB = r"^error: |rank \d+ (?:of \d+ )?on |^all \d+ ranks wait|^a signal ended"
OF_A_LAUNCHER = r"RUNNING AT|Peer host:|srun: error: \w+: task|noticed that"
SETTING = (
    "Three virtual hosts of one rank each, `--steps 100 --checkpoint-every 10 --end-on-stall --stall-after 5`, the "
    f"fault in step {FAULT_STEP}."
)


def main():
    arguments = parse()
    file = RowsFile(arguments.json, "launcher", CASES, lambda rows: f"{summary(rows)} {SETTING}")
    try:
        available = launchers()
        for launcher in [name for name in available if name.startswith(arguments.launchers)]:
            suite = Suite(launcher, available[launcher], arguments.out.absolute() / re.sub(r"\W+", "-", launcher))
            for name in arguments.cases:
                row = suite.row(name, CASES[name])
                print(line(row), flush=True)
                file.put(row, launcher, suite.made_on())
    except ClusterError as error:
        raise SystemExit(f"failure_suite.py: error: {error}") from None


def parse():
    parser = suite_parser(__doc__, "DIR/LAUNCHER/CASE", CASES)
    parser.add_argument("--launchers", default="", metavar="NAME", help="mpirun or srun (both)")
    return parser.parse_args()


class Suite:
    """One launcher's cases, in a folder, beside the run that nobody disturbs."""

    def __init__(self, launcher: str, hosts, folder: Path):
        self._launcher, self._hosts, self._folder = launcher, hosts, folder
        self._curves = {}
        folder.mkdir(parents=True, exist_ok=True)

    def row(self, name: str, case: Case) -> dict:
        """Run the case, resume it, and say what became of it."""
        expected = self._undisturbed(case.strategy)
        run = self._folder / name
        shutil.rmtree(run, ignore_errors=True)
        run.with_suffix(".txt").unlink(missing_ok=True)
        with own_disk(run / case.disk if case.disk else None):
            facts = self._failed(run, case, expected) | {"case": name, "says": case.says, "launcher": self._launcher}
            case.heal(run)
            case.afterwards(run)
            return in_words(facts | self._resumed(run, case, expected))

    def made_on(self) -> dict:
        """Machine and versions, once there is a row."""
        config = json.loads(next(self._folder.glob("*/config.json")).read_text())
        return machine() | {"mpi": config["mpi_library"]} | versions("numpy", "mpi4py")

    def _undisturbed(self, strategy: str) -> list[tuple]:
        """The curve of a run to which nothing happens."""
        run = self._folder / strategy
        if not (run / "summary.json").exists():
            shutil.rmtree(run, ignore_errors=True)
            with self._hosts() as cluster:
                process = cluster.start(train_command(run, strategy), run.with_suffix(".txt"))
                if process.wait(START_LIMIT_S + END_LIMIT_S):
                    raise SystemExit(f"failure_suite.py: error: {run}: {words(run)[-2000:]}")
        if strategy not in self._curves:
            self._curves[strategy] = curve(run)
        return self._curves[strategy]

    def _failed(self, run: Path, case: Case, expected: list[tuple]) -> dict:
        """What became of the job."""
        output = run.with_suffix(".txt")
        with self._hosts() as cluster:
            process = cluster.start(train_command(run, case.strategy, case), output)
            began = self._provoke(case, Scene(run, cluster), process)
            ended = wait_until(lambda: process.poll() is not None, END_LIMIT_S)
            seconds = time.time() - began
            wait_until(lambda: not rank_processes(run), GONE_LIMIT_S)
            survivors, gone = list(rank_processes(run)), time.time() - began
            facts = {"ended": bool(ended), "seconds": round(seconds, 2), "code": process.poll()}
            facts |= {"survivors": survivors, "gone_s": round(gone, 2)}
        step, checkpoint = last_step(run), newest_step(run)
        return facts | {
            "went_on": step == len(expected), "last_step": step, "checkpoint": checkpoint, "message": message(output),
            "skipped": skipped_steps(run), "half_written": half_written(run),
        }  # fmt: skip

    def _provoke(self, case: Case, scene: Scene, process) -> float:
        """Returns when it has begun, with the moment."""
        output = scene.run.with_suffix(".txt")
        if case.inside:
            wait_until(lambda: MARK in output.read_text() or process.poll() is not None, START_LIMIT_S)
            return fault_time(output)
        wait_until(lambda: last_step(scene.run) >= FAULT_STEP or process.poll() is not None, START_LIMIT_S)
        if process.poll() is not None or last_step(scene.run) < FAULT_STEP:
            raise SystemExit(f"failure_suite.py: error: {scene.run} did not come so far: {words(scene.run)[-2000:]}")
        began = time.time()
        case.provoke(scene)
        return began

    def _resumed(self, run: Path, case: Case, expected: list[tuple]) -> dict:
        """The same, started again as it should have been from the first, with --resume."""
        output = run.with_suffix(".resumed.txt")
        output.unlink(missing_ok=True)
        with self._hosts() as cluster:
            process = cluster.start([*train_command(run, case.strategy), "--resume"], output)
            try:
                code = process.wait(START_LIMIT_S + END_LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
        text = output.read_text()
        at = re.search(r"goes on from step (\d+)", text)
        return {
            "resumed_code": code, "resumed_from": int(at[1]) if at else 0, "resumed_message": message(output),
            "same": code == 0 and curve(run) == expected, "left_over": half_written(run),
        }  # fmt: skip


@contextmanager
def own_disk(folder: Path | None):
    """A small file system at `folder`, if there is one, while the block runs; hosts that are made in it see it."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def train_command(run: Path, strategy: str, case: Case | None = None) -> list[str]:
    """What each rank runs."""
    program = [SUITES / "failure_train.py", case.inside] if case and case.inside else [SCRIPTS / "train.py"]
    flags = [*TRAINING, *(case.flags if case else ()), "--strategy", strategy, "--out", run]
    before = case.command if case else ()
    return [str(word) for word in [*before, sys.executable, *program, *flags]]


def words(run: Path) -> str:
    return run.with_suffix(".txt").read_text()


def fault_time(output: Path) -> float:
    """When failure_train.py says that it failed."""
    text = output.read_text()
    found = re.search(rf"{MARK} ([\d.]+)", text)
    if not found:
        raise SystemExit(f"failure_suite.py: error: {output} does not say when the fault was: {text[-2000:]}")
    return float(found[1])


def message(output: Path) -> str:
    """The first line of the job that names a rank or an error; else the launcher's that names a host; else "".

    The run folder is RUN in it.
    """
    text = output.read_text(errors="replace").replace(str(output.parent / output.name.split(".")[0]), "RUN")
    lines = [line.strip(" =") for line in text.splitlines()]
    return next((line for wanted in (OF_THE_JOB, OF_A_LAUNCHER) for line in lines if re.search(wanted, line)), "")


def in_words(row: dict) -> dict:
    """The row, with what docs/failures.md shows of it: outcome, the line that says what happened, and whose it is."""
    said = row["resumed_message"] or row["message"]
    said_by = "job" if re.search(OF_THE_JOB, said) else "launcher" if said else ""
    return row | {"outcome": outcome(row), "said": said, "said_by": said_by}


def half_written(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for pattern in HALF_WRITTEN for path in run.glob(pattern))


def line(row: dict) -> str:
    parts = [f"{row['launcher']:<26} {row['case']:<16} {row['outcome']}", *row["left_over"], row["said"]]
    return "  ".join(part for part in parts if part)


if __name__ == "__main__":
    main()
