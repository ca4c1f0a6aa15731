"""Which state of the project's code is running: its git checkout's commit, and whether the files are that commit's.

git answers while the caller goes on with other work. Where it does not within LIMIT_S, as on a slow shared disk, or is
missing, or fails, the answer is None: a training never waits for it, and never ends of it.
"""

import os
import re
import subprocess
import time
from pathlib import Path

from scripts.machine.host import version_of

ROOT = Path(__file__).resolve().parents[2]
CODE = ("gpt2", "dist", "strategies", "traces", "scripts")  # what runs; a run folder or a note beside it is no change
LIMIT_S = 0.5
READING_S = 0.1  # for an answer that is there
COMMIT = re.compile(r"[0-9a-f]{40,64}")


class Checkout:
    """Begins to look on being made; `facts` has the answer. folder: where the packages lie."""

    def __init__(self, folder: Path = ROOT):
        self._begun, self._head, self._changes = time.monotonic(), None, None
        # Asked of a folder that is no checkout, git would answer for one around it, such as a user's own project.
        if (folder / ".git").exists():
            self._head = ask(folder, "rev-parse", "--verify", "HEAD")
            self._changes = ask(folder, "status", "--porcelain", "--untracked-files=normal", "--", *CODE)

    def facts(self) -> dict:
        """{"commit", "dirty"}: the commit, and whether the code differs from it; None where git did not say it in time.
        Where the commit is not known, "version", too: the package's."""
        head, changes = self._answer(self._head), self._answer(self._changes)
        if head is None or not COMMIT.fullmatch(head.strip()):
            return {"commit": None, "dirty": None, "version": version_of("gpt2-mpi")}
        return {"commit": head.strip(), "dirty": None if changes is None else bool(changes.strip())}

    def _answer(self, process: subprocess.Popen | None) -> str | None:
        """What git prints; None where it failed, or has not ended LIMIT_S after it began."""
        if process is None:
            return None
        left_s = self._begun + LIMIT_S - time.monotonic()
        with process.stdout:
            try:
                text, _ = process.communicate(timeout=max(READING_S, left_s))
            except subprocess.TimeoutExpired:
                process.kill()  # and no wait: on a disk that hangs it does not even die
                return None
        return text.decode(errors="replace") if process.returncode == 0 else None


def ask(folder: Path, *words: str) -> subprocess.Popen | None:
    """Start git on a checkout; None if it cannot be started.

    The checkout may be another user's, who shares it: git would not answer, though this code, which is in it, runs.
    Variables that lead git elsewhere (GIT_DIR, as in a hook) are left out, and it takes no lock, as it may be killed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    options = ("-C", str(folder), "-c", f"safe.directory={folder}", "-c", "core.fsmonitor=false")
    try:
        return subprocess.Popen(
            ["git", "--no-optional-locks", *options, *words], env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return None
