"""Builds what pip installs: a wheel with all packages inside one, gpt2_mpi. pyproject.toml names this as build backend.

In the repository gpt2, dist, strategies, traces and scripts lie side by side. Installed so, modules called `dist` and
`traces` would lie at the top of site-packages, where they hide others, or are hidden. So setuptools builds the wheel,
and its files move: dist/world.py becomes gpt2_mpi/dist/world.py. All imports in it are absolute and of one form, and
are written anew: "from dist.world import World" becomes "from gpt2_mpi.dist.world import World". What texts call
"python scripts/train.py" is called "gpt2-mpi train" there, and job scripts call it by `-m gpt2_mpi.scripts train`.

Other ways were worse. A hook that finds `dist` within gpt2_mpi leaves two names for one module, and tools that read
the code find neither. With relative imports `python scripts/train.py` would not run from the repository any more.

An editable install, as of `make setup`, is setuptools' own: it puts the repository's folder on Python's path.
To try it: pip wheel --no-deps . (this file is scripts/makers/one_package.py; see PEP 517 for the functions' names).
"""

import ast
import re
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from setuptools import build_meta

# The hooks that stay setuptools' own. One is left out: metadata before the wheel would name the programs of the folder.
build_editable = build_meta.build_editable
build_sdist = build_meta.build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable

PACKAGE = "gpt2_mpi"
INSIDE = ("gpt2", "dist", "strategies", "traces", "scripts")
DOCSTRING = '"""GPT-2 trained under MPI: see where a step\'s time goes, choose how gradients are exchanged."""\n'


def build_wheel(wheel_directory: str, config_settings=None, metadata_directory=None) -> str:
    """The hook of PEP 517; returns the wheel's file name."""
    name = build_meta.build_wheel(wheel_directory, config_settings)
    path = Path(wheel_directory) / name
    with ZipFile(path) as wheel:
        files = {member: wheel.read(member) for member in wheel.namelist()}
    with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
        for member, content in in_one_package(files).items():
            wheel.writestr(member, content)
    return name


def in_one_package(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a wheel by name, moved, with a RECORD of their hashes (the format of PEP 427)."""
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    folder = record.rpartition("/")[0]
    programs = {Path(name).stem for name in files if re.fullmatch(r"scripts/[a-z]\w*\.py", name)}
    moved = {f"{PACKAGE}/__init__.py": DOCSTRING.encode()}
    for name, content in files.items():
        if name.partition("/")[0] not in INSIDE:
            moved[name] = content
        elif name.endswith(".py"):
            moved[f"{PACKAGE}/{name}"] = with_commands(with_imports(content.decode(), name), programs).encode()
        elif name.endswith(".sbatch"):
            moved[f"{PACKAGE}/{name}"] = with_modules(content.decode(), programs).encode()
        else:
            moved[f"{PACKAGE}/{name}"] = content
    entries = f"{folder}/entry_points.txt"
    moved[entries] = re.sub(r"= (?=scripts\.)", f"= {PACKAGE}.", moved[entries].decode()).encode()
    moved[f"{folder}/top_level.txt"] = f"{PACKAGE}\n".encode()
    del moved[record]
    return moved | {record: record_of(moved, record).encode()}


def record_of(files: dict[str, bytes], record: str) -> str:
    hashes = {name: urlsafe_b64encode(sha256(content).digest()).rstrip(b"=") for name, content in files.items()}
    lines = [f"{name},sha256={hashes[name].decode()},{len(content)}\n" for name, content in files.items()]
    return "".join([*lines, f"{record},,\n"])


def with_imports(source: str, name: str) -> str:
    """A module's text with `from dist...` as `from gpt2_mpi.dist...`, all else as it was. ValueError: another form."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.partition(".")[0] in INSIDE:
            # Columns are counted in bytes of UTF-8. A line with an import holds nothing else before it.
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace("from ", f"from {PACKAGE}.", 1)
        elif isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in INSIDE for alias in node.names):
            raise ValueError(f"{name}:{node.lineno}: `import X.Y` of this project's own, expected `from X import Y`")
    return "".join(lines)


def with_commands(source: str, programs: set[str]) -> str:
    """A module's text with "python scripts/train.py" as "gpt2-mpi train", in messages, --help and comments."""
    names = "|".join(sorted(programs))
    pattern = rf"(?:python )?\bscripts/({names})\.py"
    return re.sub(pattern, lambda found: f"gpt2-mpi {found[1].replace('_', '-')}", source)


def with_modules(script: str, programs: set[str]) -> str:
    """A job script's text with `"$python" scripts/train.py` as `"$python" -m gpt2_mpi.scripts train`.

    Its other words are as with_commands has them, and other job scripts lie beside it.
    """
    calls = rf"""("\$python"\)? )scripts/({"|".join(sorted(programs))})\.py"""
    script = re.sub(calls, rf"\1-m {PACKAGE}.scripts \2", script)
    return with_commands(script.replace("scripts/slurm/", ""), programs)
