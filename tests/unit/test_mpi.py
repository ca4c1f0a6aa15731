"""dist/mpi.py: what is said where there is no MPI, on machines that lack it in different ways."""

import subprocess
import sys
from pathlib import Path

import pytest

from dist import mpi as module

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
# mpi4py is there, and its library is not: what its wheels raise, in many lines.
NO_LIBRARY = (
    "import sys, types\n"
    "sys.modules['mpi4py'] = types.ModuleType('mpi4py')\n"
    "sys.modules['mpi4py'].rc = lambda **options: None\n"
    "sys.modules['mpi4py'].__spec__ = 1\n"
    "def __getattr__(name): raise RuntimeError('cannot load MPI library\\nlibmpi.so: no such file')\n"
    "sys.modules['mpi4py'].__getattr__ = __getattr__\n"
)


def run(program: str, *words, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_debian_s_mpich_has_another_name_and_a_link_mends_it(monkeypatch):
    monkeypatch.setattr(module, "library_path", {"mpich": "/usr/lib/x/libmpich.so.12.2.2"}.get)
    monkeypatch.setattr(module, "can_load", lambda name: False)
    why, fix = module.what_is_missing()
    assert "looks for libmpi.so.12, and this machine's MPICH is libmpich.so.12.2.2" in why
    assert f"ln -s /usr/lib/x/libmpich.so.12.2.2 {sys.prefix}/mpi/libmpi.so.12;" in fix
    assert f"export LD_LIBRARY_PATH={sys.prefix}/mpi;" in fix
    assert "pip install --force-reinstall --no-binary mpi4py mpi4py" in fix


@pytest.mark.parametrize(("mpich", "loads"), [(None, False), ("/usr/lib/libmpich.so.12", True)])
def test_elsewhere_an_mpi_is_to_be_installed(monkeypatch, mpich, loads):
    monkeypatch.setattr(module, "library_path", lambda name: mpich)
    monkeypatch.setattr(module, "can_load", lambda name: loads)
    why, fix = module.what_is_missing()
    assert why.startswith("mpi4py finds no MPI: ")
    assert fix == module.INSTALL


def test_a_library_is_found_by_its_name():
    assert Path(module.library_path("c")).name.startswith("libc.so")
    assert module.library_path("surely-nothing") is None
    assert not module.can_load("libsurely-nothing.so.1")


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_a_training_without_mpi_ends_with_one_line_for_all_ranks(rank, lines):
    program = NO_LIBRARY + "from dist.world import start_world\nstart_world()\n"
    result = run(program, PMI_RANK=rank)
    assert result.returncode == 2
    assert result.stderr.count("\n") == lines
    assert not lines or result.stderr.startswith("error: mpi4py finds no MPI: cannot load MPI library: load the site's")


def test_make_setup_is_told():
    result = run(NO_LIBRARY + "import runpy\nrunpy.run_module('dist.mpi', run_name='__main__')\n")
    assert result.stderr.startswith(
        "warning: no rank can start yet: mpi4py finds no MPI: cannot load MPI library: load"
    )
    assert run("import runpy\nrunpy.run_module('dist.mpi', run_name='__main__')\n").stderr == ""
