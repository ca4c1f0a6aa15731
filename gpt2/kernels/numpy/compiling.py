"""Compile by numba, once on a node: what one process has compiled, the others load, also those that start with it.

numba's own cache on disk has an index of each function's compiled forms, and a file for each, written one after the
other. Two processes that compile unlike forms at once may leave an index that names the other's machine code. Who reads
between the two writes, after the source has changed, loads what was compiled before. So does who changes a function of
another file that is compiled into this one's, as numba looks at the function's own file alone. Here a form is one file
that holds all it depends on, and gets its name when it is complete.

Processes of a node that miss a form at once would all compile it, each on a share of the cores. So the first one locks
it, and the others sleep until it is there. A lock ends with its process.
"""

import ast
import hashlib
import inspect
import os
import pickle
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path

import numba
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from gpt2.errors import UserError
from gpt2.files import alone, machine_folder, regular, replacing

WAIT_S = 30.0  # for another process that compiles a form, which takes it a second; then this one compiles it, too


def compiled(function=None, *, fastmath=False):
    """Compile at the first call with these dtypes; x / 0 is inf as in NumPy, since a check would hinder vectors.

    Without `fastmath` each element is IEEE arithmetic, the same bits however an array is cut.
    """
    if function is None:
        return partial(compiled, fastmath=fastmath)
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    dispatcher = numba.njit(no_cfunc_wrapper=True, **options)(function)  # nobody calls it from C
    with suppress(RuntimeError):  # neither this folder nor the user's can be written: each process compiles for itself
        dispatcher._cache = FormCache(function)
    return dispatcher


def cpu_features() -> set[str]:
    """LLVM's names of the instruction sets that numba compiles for."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {name.removeprefix("+") for name in features.split(",") if name.startswith("+")}


# A row's sum in as many partial sums as a vector is wide; fixed when compiled, so the same in every run.
compiled_sums = compiled(fastmath={"reassoc", "contract", "nsz"})


class FormCache(FunctionCache):
    """numba's cache of one function's forms, with other files, and with locks.

    A form's key has the types of its arguments, the CPU's name and instructions, and a hash of the function's bytecode.
    keeps: False from the first form on that this process could not keep. Then it waits for none, and compiles each.
    """

    keeps = True

    def __init__(self, function):
        super().__init__(function)
        source = Path(inspect.getfile(function))
        stamp, owners = (numba.__version__, sources_hash(source)), {os.getuid(), 0, source.stat().st_uid}
        self._cache_file = Forms(Path(self.cache_path), self._impl.filename_base, stamp, owners)
        self._locks = {}  # of the forms that this process compiles: {types of the arguments: ExitStack}

    def load_overload(self, types, target_context):
        """The form for these arguments; or None, and then this process is to compile and to save it."""
        form = super().load_overload(types, target_context)
        if form is None:
            self._lock(types, target_context)
            form = super().load_overload(types, target_context)  # another process may have compiled it meanwhile
            if form is not None:
                self._unlock(types)
        return form

    def save_overload(self, types, form):
        try:
            super().save_overload(types, form)
        except (OSError, UserError):  # a full disk: whoever waits for a form waits in vain
            FormCache.keeps = False
        finally:
            self._unlock(types)

    def _lock(self, types, target_context):
        folder = machine_folder()
        if folder is None or types in self._locks or not FormCache.keeps:
            return
        form = self._cache_file.path(self._index_key(types, target_context.codegen()))
        lock = folder / f"compiling-{_digest(form)}.lock"
        self._locks[types] = ExitStack()
        self._locks[types].callback(lock.unlink, missing_ok=True)
        self._locks[types].enter_context(alone(lock, WAIT_S))

    def _unlock(self, types):
        self._locks.pop(types, ExitStack()).close()


class Forms:
    """The files of one function's forms, in the place of numba's IndexDataCacheFile.

    stamp: what they were compiled by, and a hash of the sources. With another one a file is not used, and is replaced.
    owners: users whose files are read, as what is unpickled may run anything: this one, root, and who may change the
    source. NUMBA_CACHE_DIR may be a folder that all users of a machine can write, or one that another has made.
    """

    def __init__(self, folder: Path, name: str, stamp, owners: set[int]):
        self.folder, self.name, self.stamp, self.owners = folder, name, stamp, owners

    def path(self, key) -> Path:
        return self.folder / f"{self.name}.{_digest(key)}.nbc"

    def load(self, key):
        """What was saved, or None."""
        try:
            with open(self.path(key), "rb", opener=regular) as file:
                if os.fstat(file.fileno()).st_uid not in self.owners:
                    return None
                stamp, its_key, form = pickle.loads(file.read())
        except Exception:  # there is none, or it is damaged, or another version's: unpickling may raise anything
            return None
        return form if (stamp, its_key) == (self.stamp, key) else None

    def save(self, key, form) -> None:
        with replacing(self.path(key)) as file:
            file.write(dumps((self.stamp, key, form)))


@cache
def sources_hash(path: Path) -> str:
    """Of a module's text, and of those beside it that it imports, and so on: what is compiled may be of any of them."""
    left, found = [path], {}
    while left:
        file = left.pop()
        if file in found or not file.is_file():
            continue
        found[file] = file.read_bytes()
        names = {name for node in ast.walk(ast.parse(found[file])) for name in _imported(node)}
        left += [path.with_name(f"{name}.py") for name in names]
    return _digest(sorted((file.name, text) for file, text in found.items()))


def _imported(node: ast.AST) -> list[str]:
    """What an import may take from its folder: the last name of `import a.b`, b and c of `from a.b import c`."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return []
    names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
    return [name.rpartition(".")[2] for name in names]


def _digest(value) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
