"""Which commit is running, as config.json says it: git is asked about checkouts of all kinds, and never waited for."""

import os
import shutil
import subprocess
import time

import pytest

from scripts.machine import checkout
from scripts.machine.checkout import Checkout
from scripts.machine.host import version_of

pytestmark = [pytest.mark.any_mpi, pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")]
AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
UNKNOWN = {"commit": None, "dirty": None, "version": version_of("gpt2-mpi")}


def git(folder, *words) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *AUTHOR, *words]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout with one file of code, which ignores runs/."""
    monkeypatch.setattr(checkout, "LIMIT_S", 30)  # of a machine that is busy with other tests
    folder = tmp_path / "project"
    for name in ("gpt2", "scripts"):
        (folder / name).mkdir(parents=True)
        (folder / name / "code.py").write_text("1\n")
    (folder / ".gitignore").write_text("/runs/\n__pycache__/\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_the_commit_and_whether_the_code_is_as_committed(project):
    head = git(project, "rev-parse", "HEAD")
    assert Checkout(project).facts() == {"commit": head, "dirty": False}
    for name in ("runs/a/config.json", "elsewhere/config.json", "gpt2/__pycache__/code.pyc", "notes.txt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    assert Checkout(project).facts() == {"commit": head, "dirty": False}
    (project / "gpt2" / "code.py").write_text("2\n")
    assert Checkout(project).facts() == {"commit": head, "dirty": True}
    git(project, "commit", "-q", "-a", "-m", "second")
    facts = Checkout(project).facts()
    assert facts == {"commit": git(project, "rev-parse", "HEAD"), "dirty": False}
    assert facts["commit"] != head
    (project / "scripts" / "new.py").touch()
    assert Checkout(project).facts()["dirty"] is True


def test_variables_of_git_lead_nowhere_else(project, tmp_path, monkeypatch):
    """A hook sets them for what it starts."""
    expected = Checkout(project).facts()
    git(tmp_path, "init", "-q", "hooked")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "hooked" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "hooked"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert Checkout(project).facts() == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_checkout(project):
    """git calls its ownership dubious, and answers all the same."""
    expected = Checkout(project).facts()
    for path in (project, *project.rglob("*")):
        os.chown(path, 12345, 12345)
    with pytest.raises(subprocess.CalledProcessError):
        git(project, "rev-parse", "HEAD")
    assert Checkout(project).facts() == expected


@pytest.mark.parametrize("damage", ["installed in another project", "no commit", "no repository", "no git"])
def test_without_an_answer_nothing_is_known(project, monkeypatch, tmp_path, damage):
    if damage == "installed in another project":
        project = project / ".venv" / "site-packages"
        project.mkdir(parents=True)
    elif damage == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        shutil.rmtree(project / ".git")
        (project / ".git").write_text("gitdir: /nowhere\n")
        if damage == "no commit":
            (project / ".git").unlink()
            git(project, "init", "-q")
    assert Checkout(project).facts() == UNKNOWN


def test_a_slow_git_is_not_waited_for(project, monkeypatch, tmp_path):
    """The commit is quick even there; the search for changes is not."""
    real = shutil.which("git")
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "git"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *status*) exec sleep 60;; esac\nexec {real} "$@"\n')
    slow.chmod(0o755)
    head = git(project, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(checkout, "LIMIT_S", 3)
    begun = time.monotonic()
    assert Checkout(project).facts() == {"commit": head, "dirty": None}
    assert time.monotonic() - begun < 30


def test_an_answer_that_was_there_in_time_is_taken_late(project, monkeypatch):
    monkeypatch.setattr(checkout, "LIMIT_S", 0)
    monkeypatch.setattr(checkout, "READING_S", 30)
    assert Checkout(project).facts()["dirty"] is False
