"""Identify the running code: the commit of its git checkout, and whether files differ from it.

git runs while the caller does other work. If git is missing, fails, or takes longer than LIMIT_S (on a slow shared
disk, for example), the answer is None, so a training run neither waits for git nor fails because of it.
"""

import hashlib
import os
import subprocess
import time
from pathlib import Path

from scripts.machine.host import version_of

ROOT = Path(__file__).resolve().parents[2]
CODE = ("gpt2", "dist", "strategies", "traces", "scripts")  # only changes here count
LIMIT_S = 0.5
READING_S = 0.1  # to read the output of a git that has ended


class Checkout:
    """Starts git in its constructor; `facts` waits for the answer. folder: the project's root."""

    def __init__(self, folder: Path = ROOT):
        self._begun = time.monotonic()
        self._head = None
        self._changes = None
        # In a folder that is not a checkout, git would describe an enclosing checkout, such as a user's project.
        if (folder / ".git").exists():
            self._head = ask(folder, "rev-parse", "--verify", "HEAD")
            self._changes = ask(folder, "status", "--porcelain", "--untracked-files=normal", "--", *CODE)

    def facts(self) -> dict:
        """Return {"commit", "dirty"}: the commit, and whether the code differs from it; None if unknown.

        If the commit is unknown, the package's "version" is added.
        """
        head = self._answer(self._head)
        changes = self._answer(self._changes)
        if head is None:
            return {"commit": None, "dirty": None, "version": version_of("gpt2-mpi")}
        return {"commit": head.strip(), "dirty": None if changes is None else bool(changes.strip())}

    def _answer(self, process: subprocess.Popen | None) -> str | None:
        """Return git's output; None if git failed or took longer than LIMIT_S."""
        if process is None:
            return None
        left_s = self._begun + LIMIT_S - time.monotonic()
        with process.stdout:
            try:
                text, _ = process.communicate(timeout=max(READING_S, left_s))
            except subprocess.TimeoutExpired:
                process.kill()  # without waiting: while a disk hangs, git may not die
                return None
        return text.decode(errors="replace") if process.returncode == 0 else None


def ask(folder: Path, *words: str) -> subprocess.Popen | None:
    """Start git on a checkout. Return None if git cannot be started.

    safe.directory lets git read another user's checkout. Variables that would lead git elsewhere, such as GIT_DIR in a
    hook, are removed. git takes no lock because it may be killed.
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


def source_hash(root: Path = ROOT) -> str:
    """Return eight hexadecimal digits that depend on every source file of the project."""
    digest = hashlib.sha1(usedforsecurity=False)
    for folder in CODE:
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]
