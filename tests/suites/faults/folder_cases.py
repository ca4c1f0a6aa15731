"""What goes wrong with what a run reads and writes: its folder and another job in it, data, traces, state, output."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np

from gpt2.data.shards import write_shard
from gpt2.formats import checkpoints
from tests.suites.faults.case import (
    ENDS,
    ERROR,
    FAULT_STEP,
    GOES_ON,
    IN_RANK,
    MISTAKE,
    TO_THE_END,
    VICTIM,
    Case,
    Scene,
    data_folder,
    stop_ranks,
)  # fmt: skip
from tests.suites.faults.cases import killed
from tests.suites.faults.disk import fill
from tests.suites.faults.log import message, newest_step
from tests.suites.faults.processes import is_loaded, send, wait_until

SECOND_LIMIT_S = 60
LAST_STEP, CHECKPOINT_STEP = 100, 40
TOKENS, VOCABULARY = 100_000, 256
SHARDS = ("--train-data", "{data}/train_*.bin", "--vocab-size", VOCABULARY)
LOADED = "_multiarray_umath"  # a part of NumPy: the rank's program has begun, its modules are being imported
STEP_30 = "step-00000030"
OTHER_JOB = ERROR + r".*\b(process|pid) \d+ on node0"
TRACING = r"^warning: .*traces"


def write_data(run: Path) -> None:
    """The shard that {data} stands for."""
    data_folder(run).mkdir(exist_ok=True)
    write_shard(data_folder(run) / "train_000.bin", np.random.default_rng(0).integers(VOCABULARY, size=TOKENS))


def second_job(scene: Scene, *flags: str) -> None:
    """Start the same once more, and wait until it ends; what became of it is scene.second."""
    output, begun = scene.run.with_suffix(".second.txt"), time.time()
    output.unlink(missing_ok=True)
    process = scene.cluster.start([*scene.command, "--resume", *flags], output, scene.ranks_count)
    ended = wait_until(lambda: process.poll() is not None, SECOND_LIMIT_S)
    facts = {"ended": bool(ended), "seconds": round(time.time() - begun, 2), "code": process.poll()}
    scene.second = facts | {"message": message(output)}


def second_beside_stopped(scene: Scene) -> None:
    pids = stop_ranks(scene)
    second_job(scene)
    send(signal.SIGCONT, *pids)


def taken_over(scene: Scene) -> None:
    pids = stop_ranks(scene)
    second_job(scene, "--take-over")
    send(signal.SIGCONT, *pids)


def all_killed(scene: Scene) -> None:
    scene.signal_ranks(signal.SIGKILL)


def other_data(scene: Scene) -> None:
    """The victim's host sees another file of the same size and the same first half under the same name."""
    path = scene.data() / "train_000.bin"
    other, content = path.with_name("other"), bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = bytes(len(content) - half)
    other.write_bytes(content)
    scene.on_victim("mount", "--bind", other, path)


def cut_data(scene: Scene) -> None:
    os.truncate(scene.data() / "train_000.bin", 2048)


def own_folder(scene: Scene) -> None:
    """The victim's host has a disk of its own where the others share the run folder."""
    scene.run.mkdir()
    scene.on_victim("mount", "-t", "tmpfs", "tmpfs", scene.run)


def stale_summary(scene: Scene) -> None:
    scene.run.mkdir()
    (scene.run / "summary.json").write_text('{"steps": 100}\n')


def litter(run: Path) -> None:
    """What people put beside checkpoints: an archive, notes, a checkpoint that is a link to another disk."""
    folder, elsewhere = run / "checkpoints", run.with_suffix(".elsewhere")
    shutil.rmtree(elsewhere, ignore_errors=True)
    newest = checkpoints.newest_first(folder)[0]
    shutil.move(newest, elsewhere)
    newest.symlink_to(elsewhere)
    (folder / f"{STEP_30}.tar.gz").write_bytes(b"an archive")
    (folder / "step-notes").mkdir()
    (folder / "step-notes" / "read.me").touch()


def litter_is_there(run: Path) -> list[str]:
    folder, elsewhere = run / "checkpoints", run.with_suffix(".elsewhere")
    kept = [folder / f"{STEP_30}.tar.gz", folder / "step-notes" / "read.me", elsewhere / checkpoints.MARKER]
    return [f"{path.name} is gone" for path in kept if not path.exists()]


def unmount(folder: str):
    """A function that takes a run's folder off its own disk: what was there is lost."""
    return lambda run: subprocess.run(["umount", "--lazy", run / folder], check=True)


def usr1_while_it_loads(scene: Scene) -> None:
    """To every rank, when its program has begun to import its modules."""
    for pid in scene.ranks().values():
        wait_until(lambda pid=pid: is_loaded(pid, LOADED), SECOND_LIMIT_S)
        send(signal.SIGUSR1, pid)


def no_checkpoint_since(step: int):
    """A function that sees checkpoints of later steps, which must not be there."""
    return lambda run: [f"a checkpoint of step {found}"] if (found := newest_step(run)) > step else []


SLOW = f"slow:{IN_RANK}"
PATIENT = ("--stall-after", 60)
DRIFT = {"inside": f"drift:{IN_RANK}", "code": MISTAKE, "strategy": ("allreduce",)}
FOLDER_CASES = {
    "second-job": Case("a second job is started with the same `--out`", GOES_ON, second_job, SLOW, second=MISTAKE,
                       line=OTHER_JOB),
    "second-stopped": Case("the same, while all ranks of the first are stopped", GOES_ON, second_beside_stopped, SLOW,
                           PATIENT, second=MISTAKE, line=OTHER_JOB),
    "taken-over": Case("the same, with `--take-over`, and then the first is continued", TO_THE_END, taken_over, SLOW,
                       PATIENT, second=0, by_launcher=True),
    "holder-died": Case("all ranks are killed; the same command again, without `--take-over`", provoke=all_killed,
                        by_launcher=True, take_over=False),
    "nan-gradients": Case("gradients are NaN in a step that has a checkpoint",
                          inside=f"nan-gradients:{VICTIM}:{CHECKPOINT_STEP}", code=MISTAKE, line=ERROR),
    "nan-last": Case("gradients are NaN in the last step", TO_THE_END, code=MISTAKE,
                     inside=f"nan-gradients:{VICTIM}:{LAST_STEP}", line=f"{ERROR}.*100"),
    "traces-full": Case("the disk of `traces/` is full", GOES_ON, lambda scene: fill(scene.run / "traces"),
                        disk="traces", heal=unmount("traces"), line=TRACING),
    "traces-gone": Case("`traces/` is removed", GOES_ON, lambda scene: shutil.rmtree(scene.run / "traces")),
    "checkpoints-gone": Case("`checkpoints/` is removed", GOES_ON,
                             lambda scene: shutil.rmtree(scene.run / "checkpoints", ignore_errors=True)),
    "drift-two": Case("a rank's parameters differ, with two ranks", flags=("--check-replicas", 10), ranks=2,
                      line=f"{ERROR}.*rank [01] on", **DRIFT),
    "drift-checkpoint": Case("a rank's parameters differ, and a checkpoint is due before the next `--check-replicas`",
                             line=ERROR, flags=("--check-replicas", 16), **DRIFT),
    "validation": Case("a validation takes longer than `--stall-after`, with `--server dedicated`", GOES_ON,
                       inside=f"long-validation:all:{FAULT_STEP}", flags=("--eval-every", CHECKPOINT_STEP),
                       strategy=("reduce-bcast", "--server", "dedicated")),
    "other-data": Case("one host has other data under the same path", before=other_data, code=MISTAKE,
                       strategy=("reduce-scatter", *SHARDS), line=f"{ERROR}.*node1"),
    "data-cut": Case("the data are truncated while being read", provoke=cut_data, strategy=("reduce-scatter", *SHARDS),
                     heal=write_data, code=MISTAKE, line=f"{ERROR}.*train_000.bin"),
    # A file system may tell a host for 10 s that a new file is not there.
    "own-folder": Case("one host does not share the run folder", before=own_folder, code=MISTAKE, within_s=15,
                       line=f"{ERROR}.*node1"),
    "stale-summary": Case("an earlier run's summary.json is there, and a rank is killed", ENDS, killed,
                          before=stale_summary, by_launcher=True),
    "litter": Case("notes, an archive and a linked checkpoint lie in `checkpoints/`", provoke=killed, by_launcher=True,
                   afterwards=litter, check=litter_is_there),
    "usr1-start": Case("SIGUSR1 to all ranks while they start", GOES_ON, usr1_while_it_loads, at_start=True),
    "stdout-full": Case("the disk behind rank 0's standard output is full", GOES_ON,
                        command=("sh", "-c", 'exec "$@" >/dev/full', "sh")),
    "stdout-gone": Case("nobody reads the ranks' standard output any more (`| head -n 1`)", GOES_ON,
                        command=("bash", "-c", 'exec "$@" > >(head -n 1)', "bash")),
}  # fmt: skip
