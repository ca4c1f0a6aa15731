"""scripts/makers/one_package.py: what is written anew in a module's text; scripts/__main__.py: what is no command."""

import sys

import pytest

from scripts import __main__ as module
from scripts.makers.one_package import in_one_package, with_commands, with_imports, with_modules

pytestmark = pytest.mark.any_mpi


def test_imports_of_our_own_packages_are_written_anew_and_nothing_else_is():
    source = (
        '"""é: from dist.world import World, as said here."""\n'
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from dist import world\n"
        "from dist.world import (\n    World,\n)\n"
        "from distutils import from_dist\n"
        "def late():\n"
        "    from scripts.checkup import together  # from scripts, late\n"
        "    return 'from dist import nothing'\n"
    )
    assert with_imports(source, "x.py") == (
        source.replace("\nfrom dist import", "\nfrom gpt2_mpi.dist import")
        .replace("\nfrom dist.world import (", "\nfrom gpt2_mpi.dist.world import (")
        .replace("    from scripts.checkup", "    from gpt2_mpi.scripts.checkup")
    )


def test_an_import_that_names_no_part_is_refused():
    with pytest.raises(ValueError, match=r"^x\.py:2: .*expected `from X import Y`"):
        with_imports("import os\nimport dist.world\n", "x.py")


def test_programs_are_called_by_their_commands():
    text = "run python scripts/bench_step.py, or scripts/train.py; scripts/slurm/train.sbatch and scripts/other.py stay"
    assert with_commands(text, {"train", "bench", "bench_step"}) == (
        "run gpt2-mpi bench-step, or gpt2-mpi train; scripts/slurm/train.sbatch and scripts/other.py stay"
    )


def test_job_scripts_call_what_is_installed_and_each_other_where_they_are_submitted():
    script = '# scripts/plot.py\n"$python" scripts/bench_step.py\n$(printf %q "$python") scripts/plot.py\n'
    assert with_modules(f"{script}bash scripts/slurm/train.sbatch scripts/other.py\n", {"plot", "bench_step"}) == (
        '# gpt2-mpi plot\n"$python" -m gpt2_mpi.scripts bench_step\n$(printf %q "$python") -m gpt2_mpi.scripts plot\n'
        "bash train.sbatch scripts/other.py\n"
    )


def test_a_wheel_s_files_move_into_one_package():
    files = {
        "dist/world.py": b"from gpt2 import files\n", "scripts/train.py": b"", "gpt2/a.cu": b"from dist import x",
        "scripts/slurm/a.sbatch": b'"$python" scripts/train.py',
        "x-1.dist-info/entry_points.txt": b"[console_scripts]\nx = scripts.__main__:main\n",
        "x-1.dist-info/top_level.txt": b"dist\ngpt2\nscripts\n", "x-1.dist-info/RECORD": b"dist/world.py,,\n",
    }  # fmt: skip
    moved = in_one_package(files)
    assert moved["gpt2_mpi/dist/world.py"] == b"from gpt2_mpi.gpt2 import files\n"
    assert moved["gpt2_mpi/scripts/slurm/a.sbatch"] == b'"$python" -m gpt2_mpi.scripts train'
    assert moved["gpt2_mpi/gpt2/a.cu"] == b"from dist import x"
    assert moved["x-1.dist-info/entry_points.txt"].endswith(b"\nx = gpt2_mpi.scripts.__main__:main\n")
    assert {name.partition("/")[0] for name in moved} == {"gpt2_mpi", "x-1.dist-info"}
    assert [line.split(",")[0] for line in moved["x-1.dist-info/RECORD"].decode().splitlines()] == [*moved]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "a command is missing"),
        (["trian", "--steps", "3"], "'trian' is not a command: did you mean train?"),
        (["bench"], "'bench' is not a command"),
        (["xyz"], "'xyz' is not a command (see"),
    ],
)
def test_what_is_no_command_is_one_line(words, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpt2-mpi", *words])
    with pytest.raises(SystemExit) as ended:
        module.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"gpt2-mpi: error: {says}")
    assert said.count("\n") == 1


def test_a_program_gets_its_words(monkeypatch):
    called = []
    monkeypatch.setattr(module.runpy, "run_module", lambda name, run_name: called.append((name, run_name, sys.argv)))
    for spelt in ("bench-step", "bench_step", "bench_step.py"):
        monkeypatch.setattr(sys, "argv", ["gpt2-mpi", spelt, "--help"])
        module.main()
    assert called == [("scripts.bench_step", "__main__", ["gpt2-mpi bench-step", "--help"])] * 3
