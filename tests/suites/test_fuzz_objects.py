"""No file is ever unpickled, evaluated or loaded as objects: a scan of all sources."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).parents[2]
OBJECTS_OUT_OF_FILES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "jsonpickle"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}


def unpickling(tree: ast.Module) -> list[str]:
    """What in a module could make objects of a file's bytes, or run them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in modules if name.split(".")[0] in OBJECTS_OUT_OF_FILES]
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called in RUNS_TEXT:
            found.append(called)
        if called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
            found.append(called)
        if called == "torch.load" and given.get("weights_only") != "True":
            found.append(called)
    return found


def test_no_file_is_unpickled():
    """What ranks send each other over MPI may be pickled: that is no file. A compiled kernel is machine code in any
    case, beside the source or in the user's own cache folder, and numba has it as pickles."""
    sources = [
        path for name in ("gpt2", "dist", "strategies", "traces", "scripts") for path in (ROOT / name).rglob("*.py")
    ]
    assert len(sources) > 150
    found = {path: names for path in sources if (names := unpickling(ast.parse(path.read_text())))}
    assert found == {ROOT / "gpt2/kernels/numpy/compiling.py": ["pickle"]}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from yaml import load", "import os, shelve", "from dill.source import x", "torch.load(path)",
        "np.load(path, allow_pickle=True)", "eval(text)", "torch.load(path, weights_only=False)",
    ],
)  # fmt: skip
def test_unpickling_is_found(line):
    assert unpickling(ast.parse(line))
