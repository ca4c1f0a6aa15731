"""What files take the place of: nothing or a regular file, through a link too. All else is refused and stays."""

import json
import os
import socket
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.files import new_folder, place_of_file, replacing, replacing_in, write_json
from gpt2.formats import llmc
from gpt2.parameters import Layout, Parameters
from tests.support import faulty_runs

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
NOBODY = 65534
NO_FILES = {
    "folder": "a folder", "pipe": "a named pipe", "socket": "a socket", "dangling": "where nothing is",
    "to-pipe": "a named pipe", "/dev/null": "a device",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With one of each kind of NO_FILES; the current one, so that a socket's name is short."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "to-pipe").symlink_to("pipe")
    return tmp_path


def kinds(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IFMT(path.lstat().st_mode) for path in folder.iterdir()}


def model_file(path: Path) -> Path:
    parameters = Parameters.zeros(Layout(GPT2Config(n_layer=1, n_head=1, n_embd=4, context=3, vocab_size=5)))
    llmc.write_parameters(path, parameters)
    return path


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_refused_and_stays(folder, name):
    before = kinds(folder)

    def by_replacing():
        with replacing(Path(name)) as file:
            file.write(b"x")

    for write in (by_replacing, lambda: write_json(Path(name), {}), lambda: place_of_file(Path(name))):
        with pytest.raises(UserError, match=f"{name}: .*{NO_FILES[name]}") as raised:
            write()
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=name), replacing_in(Path(name).parent) as new:
        (new / Path(name).name).write_text("x")
    assert kinds(folder) == before


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to("middle")
    (tmp_path / "middle").symlink_to(target)
    opened = target.open()
    write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 1}
    assert opened.read() == "old"  # renamed, not written over
    with replacing_in(tmp_path) as new:
        (new / "link").write_text("newer")
        (new / "other").write_text("beside it")
    assert link.is_symlink()
    assert target.read_text() == "newer"
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "link", "middle", "other"}
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_permissions(tmp_path):
    """As a new file gets them; those of the file that was there stay."""
    write_json(tmp_path / "new", 1)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask
    (tmp_path / "new").chmod(0o640)
    write_json(tmp_path / "new", 2)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@contextmanager
def somebody(folder):
    """Not root, who may write everything; the folder is theirs."""
    if os.geteuid():
        yield
        return
    os.chown(folder, NOBODY, -1)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_protected_file_stays():
    with TemporaryDirectory() as folder, somebody(folder):  # pytest's own folders are closed to others
        kept = Path(folder) / "kept"
        kept.write_text("old")
        kept.chmod(0o444)
        with pytest.raises(UserError, match="Permission denied"):
            write_json(kept, 1)
        assert kept.read_text() == "old"


def test_a_writer_that_fails_leaves_all_as_it_was(tmp_path):
    def write(then) -> None:
        with replacing_in(tmp_path) as new:
            (new / "a").write_text("another")
            (new / "b").write_text("another")
            then()

    (tmp_path / "a").write_text("old")
    with pytest.raises(ZeroDivisionError):
        write(lambda: 1 / 0)
    with pytest.raises(UserError, match="a named pipe"):  # then the first is not written either
        write(lambda: os.mkfifo(tmp_path / "b"))
    assert (tmp_path / "a").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_folder_behind_a_link(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with new_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "a").read_text() == "x"
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(UserError, match="exists already"), new_folder(tmp_path / "dangling"):
        pass


def test_own_output_is_not_replaced(tmp_path):
    """`--json /dev/stdout > FILE`: FILE would lose all that was printed."""
    text = "from gpt2.files import write_json; print('printed', flush=True); write_json('/dev/stdout', 1)"
    for out in (tmp_path / "out", Path("/dev/null")):
        with out.open("w") as file:
            done = subprocess.run(
                [sys.executable, "-c", text], cwd=ROOT, stdout=file, stderr=subprocess.PIPE, text=True
            )
        assert "/dev/stdout: " in done.stderr.splitlines()[-1]
        assert "expected" in done.stderr.splitlines()[-1]
    assert (tmp_path / "out").read_text() == "printed\n"


@pytest.mark.parametrize(
    ("program", "name"),
    [("export.py", "llmc"), ("export.py", "perfetto"), ("bench_step.py", "--json"), ("plot.py", "report.html")],
)
def test_programs(folder, program, name):
    """Each ends with 2 and one line, and the pipe stays a pipe."""
    run = faulty_runs.make(folder / "run", strategy="reduce-bcast", nodes=[0, 1], steps=4, vector=1e6).path
    (run / "report.html").symlink_to(folder / "pipe")
    flags = {
        "llmc": [model_file(folder / "model.bin"), "--format", "llmc", "--out", "to-pipe"],
        "perfetto": [run, "--format", "perfetto", "--out", "to-pipe"],
        "--json": ["--json", "to-pipe"],
        "report.html": [run],
    }[name]
    before = kinds(folder)
    command = [sys.executable, ROOT / "scripts" / program, *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}: error: ")
    assert "a named pipe, expected a regular file" in line
    assert kinds(folder) == before
