"""Compile with numba once per node: a process loads the forms that another process has compiled.

A form is a function compiled for certain argument types. numba's own cache writes an index of a function's forms and
then a file for each form. This fails in three ways. Two processes that compile different forms at once may leave an
index that names the wrong machine code. A process that reads between the two writes loads outdated code. And numba only
checks the function's own source file, not the files of functions that it calls. Here each form is one file, which
holds everything it depends on and gets its name when it is complete.

Processes of a node that need a form at once would all compile it, each on its share of the cores. So the first one
locks it, and the others wait. A lock ends with its process.
"""

import hashlib
import inspect
import os
import pickle
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numba
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from gpt2.errors import UserError
from gpt2.files import alone, machine_folder, regular, replacing

WAIT_S = 30.0  # for another process to compile a form, which takes a second; then this process also compiles it


def compiled(function=None, *, fastmath=False):
    """Compile a function at its first call with new dtypes. x / 0 is inf as in NumPy: a check would prevent vectors.

    Without `fastmath` each element is IEEE arithmetic, with the same bits however an array is cut.
    """
    if function is None:
        return partial(compiled, fastmath=fastmath)
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    dispatcher = numba.njit(no_cfunc_wrapper=True, **options)(function)  # never called from C
    with suppress(RuntimeError):  # no folder can be written: each process compiles for itself
        dispatcher._cache = FormCache(function)
    return dispatcher


def cpu_features() -> set[str]:
    """Return LLVM's names of the instruction sets that numba compiles for."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {name.removeprefix("+") for name in features.split(",") if name.startswith("+")}


# Sums of a row use as many partial sums as a vector has lanes: fixed when compiled, so the same in every run.
compiled_sums = compiled(fastmath={"reassoc", "contract", "nsz"})


class FormCache(FunctionCache):
    """numba's cache of one function's forms, with our files and locks.

    A form's key has the types of its arguments, the CPU's name and instructions, and a hash of the function's bytecode.
    keeps: False once this process could not save a form. From then on it waits for no other process.
    """

    keeps = True

    def __init__(self, function):
        super().__init__(function)
        source = Path(inspect.getfile(function))
        stamp = numba.__version__, _sources_hash(source.parent)
        owners = {os.getuid(), 0, source.stat().st_uid}
        self._cache_file = Forms(Path(self.cache_path), self._impl.filename_base, stamp, owners)
        self._locks = {}  # of the forms that this process compiles: {types of the arguments: ExitStack}

    def load_overload(self, types, target_context):
        """Return the form for these argument types. None: this process must compile and save it."""
        form = super().load_overload(types, target_context)
        if form is None:
            self._lock(types, target_context)
            form = super().load_overload(types, target_context)  # another process may have compiled it by now
            if form is not None:
                self._unlock(types)
        return form

    def save_overload(self, types, form):
        try:
            super().save_overload(types, form)
        except (OSError, UserError):  # a full disk: processes would wait for this form in vain
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


@dataclass(frozen=True)
class Forms:
    """The files of one function's forms. Replaces numba's IndexDataCacheFile.

    stamp: numba's version and a hash of the modules in the function's folder. A file with another stamp is replaced.
    owners: users whose files are read: this user, root, and the owner of the source. Unpickling may run any code, and
    NUMBA_CACHE_DIR may be a folder that every user of a machine can write.
    """

    folder: Path
    name: str
    stamp: tuple
    owners: set[int]

    def path(self, key) -> Path:
        return self.folder / f"{self.name}.{_digest(key)}.nbc"

    def load(self, key):
        """Return the saved form, or None."""
        try:
            with open(self.path(key), "rb", opener=regular) as file:
                if os.fstat(file.fileno()).st_uid not in self.owners:
                    return None
                stamp, its_key, form = pickle.loads(file.read())
        except Exception:  # missing, damaged or of another version: unpickling may raise anything
            return None
        return form if (stamp, its_key) == (self.stamp, key) else None

    def save(self, key, form) -> None:
        with replacing(self.path(key)) as file:
            file.write(dumps((self.stamp, key, form)))


@cache
def _sources_hash(folder: Path) -> str:
    """Return a hash of a folder's modules: its functions may call each other."""
    return _digest(sorted((path.name, path.read_bytes()) for path in folder.glob("*.py") if path.is_file()))


def _digest(value) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
