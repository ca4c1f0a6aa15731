"""The build backend of pyproject.toml: builds a wheel with all packages inside one package, gpt2_mpi.

In the repository, gpt2, dist, strategies, traces and scripts lie side by side. If they were installed like this, the
packages `dist` and `traces` would lie at the top of site-packages, where they could hide other packages or be hidden.
So setuptools builds the wheel, and this module moves its files: dist/world.py becomes gpt2_mpi/dist/world.py. It
rewrites imports, which are all absolute: "from dist.world import World" becomes "from gpt2_mpi.dist.world import
World". It replaces "python scripts/train.py" with "gpt2-mpi train" in texts, and with `-m gpt2_mpi.scripts train` in
job scripts.
Alternatives were worse. With an import hook that finds `dist` in gpt2_mpi, a module has two names, and tools that read
the code find neither. With relative imports, `python scripts/train.py` would not run in the repository.
An editable install, as by `make setup`, is left to setuptools: it puts the repository's folder on Python's path. To
try this module: pip wheel --no-deps . (PEP 517 prescribes the names of its functions.)
"""

import ast
import re
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from setuptools import build_meta

# Hooks of setuptools, used unchanged. The metadata hook is left out because it would name programs before the move.
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
    """Build the wheel and return its file name (a hook of PEP 517)."""
    name = build_meta.build_wheel(wheel_directory, config_settings)
    path = Path(wheel_directory) / name
    with ZipFile(path) as wheel:
        files = {member: wheel.read(member) for member in wheel.namelist()}
    with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
        for member, content in in_one_package(files).items():
            wheel.writestr(member, content)
    return name


def in_one_package(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return a wheel's files by their new names, with a new RECORD of their hashes (PEP 427)."""
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
    hashes = {name: urlsafe_b64encode(sha256(content).digest()).rstrip(b"=") for name, content in moved.items()}
    lines = [f"{name},sha256={hashes[name].decode()},{len(content)}\n" for name, content in moved.items()]
    return moved | {record: "".join([*lines, f"{record},,\n"]).encode()}


def with_imports(source: str, name: str) -> str:
    """Return a module's text with `from gpt2_mpi.dist...` for `from dist...`. Raise ValueError for other imports."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.partition(".")[0] in INSIDE:
            # The node's column counts bytes of UTF-8, so search instead: an import begins its line.
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace("from ", f"from {PACKAGE}.", 1)
        elif isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in INSIDE for alias in node.names):
            raise ValueError(f"{name}:{node.lineno}: `import X.Y` of this project's own, expected `from X import Y`")
    return "".join(lines)


def with_commands(source: str, programs: set[str]) -> str:
    """Return a module's text with "gpt2-mpi train" for "python scripts/train.py" in messages, --help and comments."""
    names = "|".join(sorted(programs))
    pattern = rf"(?:python )?\bscripts/({names})\.py"
    return re.sub(pattern, lambda found: f"gpt2-mpi {found[1].replace('_', '-')}", source)


def with_modules(script: str, programs: set[str]) -> str:
    """Return a job script's text with `"$python" -m gpt2_mpi.scripts train` for `"$python" scripts/train.py`.

    Mentions of other programs are replaced as in with_commands. Other job scripts lie in the same folder.
    """
    calls = rf"""("\$python"\)? )scripts/({"|".join(sorted(programs))})\.py"""
    script = re.sub(calls, rf"\1-m {PACKAGE}.scripts \2", script)
    return with_commands(script.replace("scripts/slurm/", ""), programs)
