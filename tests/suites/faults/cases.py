"""What goes wrong in the runs of failure_suite.py, and how: from outside the job wherever it can be."""

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from gpt2.formats.checkpoint_files import rank_file
from gpt2.formats.checkpoints import newest_first
from tests.suites.faults.case import ERROR, GOES_ON, IN_RANK, INTERRUPTED, MISTAKE, TO_THE_END, VICTIM, Case, Scene
from tests.suites.faults.disk import empty, fill
from tests.suites.faults.log import newest_step
from tests.suites.faults.processes import send, wait_until

# Root may write everywhere; without these it is held back by a folder's permissions, as everybody else.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--")

# One model over the three ranks, in stages or parts that are not equal: what others wait for is another rank's piece.
STAGES = ("reduce-scatter", "--pipeline-parallel", 3, "--grad-accum", 3, "--n-layer", 4)
PARTS = ("reduce-scatter", "--tensor-parallel", 3, "--n-head", 4)


def kill_host(scene: Scene) -> None:
    """Its first process, and with it the kernel ends all others there."""
    send(signal.SIGKILL, scene.cluster.nodes[VICTIM].pid)


def fill_for_a_while(scene: Scene) -> None:
    """Until two checkpoints have failed."""
    folder = scene.run / "checkpoints"
    before = newest_step(scene.run)
    fill(folder)
    wait_until(lambda: False, 0.5)
    empty(folder)
    assert newest_step(scene.run) <= before + 10


def forbid(scene: Scene) -> None:
    subprocess.run(["chmod", "-R", "a-w", scene.run], check=True)


def allow(run: Path) -> None:
    subprocess.run(["chmod", "-R", "u+w", run], check=True)


def damage(count: int, how: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A function that does that to the victim's file of a run's `count` newest checkpoints."""

    def change(run: Path) -> None:
        for checkpoint in newest_first(run / "checkpoints")[:count]:
            path = checkpoint / rank_file(VICTIM)
            path.write_bytes(how(path.read_bytes()))

    return change


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def killed(scene: Scene) -> None:
    scene.signal_ranks(signal.SIGKILL, VICTIM)


CASES = {
    "killed": Case("a rank is killed (SIGKILL)", provoke=killed),
    "raises": Case("a rank raises an exception", inside=f"raise:{IN_RANK}", line=r"rank 1 of 3 on \S+ ends the job"),
    "exits": Case("a rank calls `os._exit(3)`", inside=f"exit:{IN_RANK}", by_launcher=True),
    "stopped": Case("a rank is stopped (SIGSTOP)", line=r"rank 1 on \S+ shows no sign of life", within_s=10,
                    provoke=lambda scene: scene.signal_ranks(signal.SIGSTOP, VICTIM)),
    "sleeps": Case("a rank hangs in Python", inside=f"sleep:{IN_RANK}", line=r"rank 1 on \S+ has been in no phase",
                   within_s=10),  # --stall-after and the 5 s of all others
    "stage-killed": Case("a stage of a pipeline is killed (SIGKILL)", provoke=killed, strategy=STAGES),
    "stage-stopped": Case("a stage is stopped (SIGSTOP)", within_s=10, strategy=STAGES,
                          line=r"rank 1 on \S+ \(stage 1\) shows no sign of life",
                          provoke=lambda scene: scene.signal_ranks(signal.SIGSTOP, VICTIM)),
    "stage-sleeps": Case("a stage hangs in Python", inside=f"sleep:{IN_RANK}", within_s=10, strategy=STAGES,
                         line=r"rank 1 on \S+ \(stage 1\) has been in no phase"),
    "part-killed": Case("a part of a model's tensors is killed (SIGKILL)", provoke=killed, strategy=PARTS),
    "part-sleeps": Case("a part hangs in Python", inside=f"sleep:{IN_RANK}", within_s=10, strategy=PARTS,
                        line=r"rank 1 on \S+ \(\w+ 1\) has been in no phase"),
    "cable": Case("a host's cable is cut", provoke=lambda scene: scene.cluster.cut_cable(VICTIM), by_launcher=True),
    "host": Case("a host dies", provoke=kill_host, by_launcher=True),
    "launcher": Case("the launcher is killed (SIGKILL)", by_launcher=True,
                     provoke=lambda scene: scene.signal_launcher(signal.SIGKILL)),
    "disk-checkpoints": Case("the disk of `checkpoints/` is full for half a second", GOES_ON, fill_for_a_while,
                             disk="checkpoints", line=r"rank \d on \S+: the checkpoint of step"),
    "disk-last": Case("the disk of `checkpoints/` stays full", TO_THE_END, disk="checkpoints", code=MISTAKE,
                      line=r"the checkpoint of step", heal=lambda run: empty(run / "checkpoints"),
                      provoke=lambda scene: fill(scene.run / "checkpoints")),
    "disk-run": Case("the run folder's disk is full", provoke=lambda scene: fill(scene.run), disk=".", heal=empty),
    "read-only": Case("the run folder becomes read-only", TO_THE_END, forbid, command=UNPRIVILEGED,
                      heal=allow, code=MISTAKE, line=r"the checkpoint of step"),
    "vanishes": Case("the run folder is removed", line=ERROR,
                     provoke=lambda scene: shutil.rmtree(scene.run, ignore_errors=True)),
    "corrupt": Case("a bit of the newest checkpoint is flipped", provoke=killed, afterwards=damage(1, flip),
                    by_launcher=True),
    "truncated": Case("a file of the newest checkpoint is cut", provoke=killed, afterwards=damage(1, truncate),
                      by_launcher=True),
    "all-damaged": Case("all checkpoints are damaged", provoke=killed, afterwards=damage(9, flip), resumed=MISTAKE,
                        by_launcher=True),
    "nan": Case("the loss is NaN", inside=f"nan:{IN_RANK}", code=MISTAKE, line=f"{ERROR}.*step 35"),
    "overflow": Case("a rank's gradients are infinite, with `--skip-outliers 6`", GOES_ON, inside=f"overflow:{IN_RANK}",
                     flags=("--skip-outliers", 6)),
    "drift": Case("a rank's parameters differ, with `--check-replicas 10`", inside=f"drift:{IN_RANK}", code=MISTAKE,
                  flags=("--check-replicas", 10), strategy=("allreduce",), line=f"{ERROR}.*rank 1 on"),
    "usr1": Case("SIGUSR1 to one rank", GOES_ON, lambda scene: scene.signal_ranks(signal.SIGUSR1, VICTIM)),
    "usr1-launcher": Case("SIGUSR1 to the launcher", GOES_ON, lambda scene: scene.signal_launcher(signal.SIGUSR1)),
    "usr2": Case("SIGUSR2 to one rank", code=INTERRUPTED,
                 provoke=lambda scene: scene.signal_ranks(signal.SIGUSR2, VICTIM)),
    "usr2-launcher": Case("SIGUSR2 to the launcher", by_launcher=True,
                          provoke=lambda scene: scene.signal_launcher(signal.SIGUSR2)),
    "term": Case("SIGTERM to all ranks", code=INTERRUPTED, provoke=lambda scene: scene.signal_ranks(signal.SIGTERM)),
    "term-launcher": Case("SIGTERM to the launcher", by_launcher=True,
                          provoke=lambda scene: scene.signal_launcher(signal.SIGTERM)),
}  # fmt: skip
