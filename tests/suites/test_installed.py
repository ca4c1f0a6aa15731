"""scripts/makers/one_package.py and scripts/__main__.py: the wheel, installed, and used outside the repository."""

import csv
import os
import re
import subprocess
import sys
import sysconfig
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from dist.probe.programs import find_mpirun, mpirun_command, mpirun_environment
from scripts.__main__ import commands
from scripts.makers.one_package import INSIDE, PACKAGE

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
TRAINING = (
    "train", "--n-layer", 1, "--n-head", 2, "--n-embd", 32, "--context", 16, "--batch-size", 2, "--steps", 6,
    "--threads", 1, "--out", "run",
)  # fmt: skip
IMPORT_ALL = """
import importlib, pkgutil, sys, gpt2_mpi
for module in pkgutil.walk_packages(gpt2_mpi.__path__, "gpt2_mpi."):
    if not module.name.startswith(("gpt2_mpi.scripts.bench_", "gpt2_mpi.scripts.doctor")):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(error.name)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"gpt2", "dist", "strategies", "traces", "scripts"}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Its Python, its command, its site-packages; and a folder with modules called as this project's packages are."""
    folder = tmp_path_factory.mktemp("installed")
    pip, quietly = [sys.executable, "-m", "pip"], ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    run([*pip, "wheel", *quietly, "--no-build-isolation", "-w", folder, source(folder / "source")])
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
    [wheel], [site] = folder.glob("*.whl"), folder.glob("venv/lib/python*/site-packages")
    run([*pip, "--python", folder / "venv/bin/python", "install", *quietly, wheel])
    names = {path.name for path in site.iterdir()}
    # What it depends on, but not this environment's editable install, which a line of a .pth file does not bring along.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    elsewhere = folder / "elsewhere"
    (elsewhere / "traces").mkdir(parents=True)
    for name in ("dist.py", "traces/__init__.py"):
        (elsewhere / name).write_text("raise SystemExit('a module of the user instead of the own one')")
    programs = folder / "venv" / "bin"
    return SimpleNamespace(
        python=programs / "python", command=programs / "gpt2-mpi", names=names, site=site, at=elsewhere
    )


def source(folder: Path) -> Path:
    """A copy of what is built: setuptools leaves files beside its sources."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", *INSIDE):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(command, **options) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_site_packages_get_one_package(installed):
    own = {name for name in installed.names if not name.startswith("_")}
    assert {name.partition("-")[0] for name in own} == {PACKAGE}
    assert len(own) == 2, "the package, and what pip knows of it"
    [record] = installed.site.glob(f"{PACKAGE}-*/RECORD")
    with open(record, newline="") as file:
        rows = [row for row in csv.reader(file) if row[1] and row[0].startswith(PACKAGE)]
    for name, digest, _ in rows:
        content = (installed.site / name).read_bytes()
        assert digest == "sha256=" + urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode(), name
    sources = {row[0] for row in rows}
    for name in ("gpt2/data/shakespeare.txt", "gpt2/kernels/cupy/attention.cuh", "strategies/ring.py"):
        assert f"{PACKAGE}/{name}" in sources


def test_each_module_is_found_by_its_new_name_alone(installed):
    printed = run([installed.python, "-P", "-c", IMPORT_ALL], cwd=installed.site.parent).splitlines()
    assert printed.pop() == "", "modules were found by the names that they have in the repository"
    assert {*printed} <= {"cupy", "torch", "rich", "otf2", "nvidia"}


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun on this machine: pip install mpich")
def test_two_ranks_train_in_another_folder_and_the_run_is_diagnosed(installed):
    # The venv has not the MPI library that lies in this environment's.
    environment = mpirun_environment(2) | {"LD_LIBRARY_PATH": f"{sys.prefix}/lib"}
    printed = run([*mpirun_command(2), installed.command, *TRAINING], cwd=installed.at, env=environment)
    assert "step 6/6" in printed
    assert (installed.at / "run" / "summary.json").exists()
    assert "strategy" in run([installed.command, "diagnose", "run"], cwd=installed.at)
    assert "usage: gpt2-mpi diagnose" in run([installed.command, "diagnose", "--help"], cwd=installed.at)


def test_a_job_script_is_written_and_trains_by_what_is_installed(installed):
    """Under --restarts, as it says; the launcher is a stand-in that starts one rank."""
    script = run([installed.command, "job"], cwd=installed.at)
    assert f"python={installed.python} " in script
    script = re.sub("^launch=.*", "launch=(env) end_signal=TERM", script, flags=re.MULTILINE)
    (installed.at / "train.sbatch").write_text(script)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}
    environment = os.environ | job | {"LD_LIBRARY_PATH": f"{sys.prefix}/lib"}
    printed = run(["bash", "train.sbatch", "job", *TRAINING[1:-2]], cwd=installed.at, env=environment)
    assert "the run has ended well" in printed
    assert "ended with exit code 0" in printed
    assert "bash train.sbatch" in run([installed.command, "job", "--sweep"], cwd=installed.at)


def test_every_program_is_listed_and_says_how_it_is_called_here(installed):
    listed = re.findall(r"^  (\S+)", run([installed.command, "--help"], cwd=installed.at), re.MULTILINE)
    assert listed == sorted(commands())
    assert {"train", "prepare", "sample", "evaluate", "export", "plot", "diagnose", "advise", "doctor", "job"} < {
        *listed
    }
    assert {"bench-exchange", "bench-step", "bench-training", "compare", "watch"} < {*listed}
    texts = [path.read_text() for path in (installed.site / PACKAGE).rglob("*.py")]
    assert not [text for text in texts if re.search(r"python scripts/(train|plot|doctor|bench_step)\.py", text)]
    assert any("mpirun -n 4 gpt2-mpi train" in text for text in texts)


def test_in_the_repository_the_same_is_python_m_scripts():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "scripts", "diagnose", "--help"]
    assert "usage: gpt2-mpi diagnose" in run(command, cwd=ROOT, env=environment)
