"""How gradients become updated parameters on every rank, from the simplest to the fastest.

Where to start: base.py defines what every strategy gets and must define. reduce_bcast.py, sliced_in_turn.py,
reduce_scatter.py and allreduce.py are one page of MPI collectives each. The others build on replicated.py and
sharded.py: first ring.py, tree.py and sliced.py, then hierarchical.py and hierarchical_sharded.py, which know the
nodes, then zero_2.py and zero_3.py. diloco.py trains other weights: it exchanges once in many steps.

Each strategy is one file here and one line below. It declares its messages, its memory and where it runs in its traits
(traits.py), so no other file names it. Your own strategy can be in any folder (docs/own-strategy.md).
"""

import importlib.util
import inspect
from functools import cache
from pathlib import Path

from gpt2.errors import UserError
from strategies.allreduce import Allreduce
from strategies.base import Job, Strategy
from strategies.diloco import Diloco
from strategies.hierarchical import Hierarchical
from strategies.hierarchical_sharded import HierarchicalSharded
from strategies.none import NoExchange
from strategies.powersgd import PowerSGD
from strategies.reduce_bcast import ReduceBcast
from strategies.reduce_scatter import ReduceScatter
from strategies.ring import Ring
from strategies.sliced import Sliced
from strategies.sliced_in_turn import SlicedInTurn
from strategies.traits import Traits
from strategies.tree import Tree
from strategies.zero_2 import Zero2
from strategies.zero_3 import Zero3

__all__ = [
    "AUTO", "BASELINE", "CONTROL", "OWN_FILE", "SERVERS", "STRATEGIES", "Job", "Strategy", "Traits",
    "candidates", "find", "is_auto", "names",
]  # fmt: skip

STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind
    for kind in (
        NoExchange,
        ReduceBcast,
        SlicedInTurn,
        Sliced,
        ReduceScatter,
        Allreduce,
        Ring,
        Tree,
        Hierarchical,
        HierarchicalSharded,
        Zero2,
        Zero3,
        PowerSGD,
        Diloco,
    )
}
BASELINE = ReduceBcast.name  # advise.py compares all strategies with it
CONTROL = NoExchange.name  # measures compute time alone

SERVERS = ("colocated", "dedicated")
OWN_FILE = ".py"  # --strategy FILE.py: the user's own strategy
AUTO = "auto"  # --strategy's default: choose by model and trial; auto:FILE,FILE also tries those files' strategies


def find(name: str) -> type[Strategy]:
    """Return the strategy with this name, or the strategy in this Python file; UserError if there is none."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    if not name.endswith(OWN_FILE):
        raise UserError(f"no strategy {name!r}: expected one of {names()}, or a Python file that holds one")
    return _in_file(Path(name))


def is_auto(strategy: str) -> bool:
    """Return whether --strategy leaves the choice to a trial."""
    return strategy.partition(":")[0] == AUTO


def candidates(strategy: str, device: str) -> dict[str, type[Strategy]]:
    """Return {value of --strategy: class}: what `auto` or `auto:FILE,FILE` may choose on a device, "host" or "gpus".

    A user's own strategy is tried wherever it can run. None with other weights: a trial measures the time alone.
    """
    files = [file for file in strategy.partition(":")[2].split(",") if file]
    own = {file: find(file) for file in files if device == "host" or find(file).traits.on_gpus}
    for file, kind in own.items():
        if not kind.traits.same_weights:
            raise UserError(f"--strategy {strategy}: {file} is approximate, auto compares only times: name it alone")
    same = {name: kind for name, kind in STRATEGIES.items() if kind.traits.same_weights}
    return {name: kind for name, kind in same.items() if device in kind.traits.auto} | own


def names(kinds=None) -> str:
    """Return the names of these strategies (None: of all) for a message."""
    return ", ".join(kind.name for kind in (STRATEGIES.values() if kinds is None else kinds))


@cache  # a file's class is made once
def _in_file(path: Path) -> type[Strategy]:
    """Return the one subclass of Strategy that a file defines. Without a `name` the class gets the file's name."""
    if not path.is_file():
        raise UserError(f"{path}: no such file, expected a Python file that holds a strategy")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported: {type(error).__name__}: {error}: mend it") from error
    kinds = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Strategy)]
    found = [kind for kind in kinds if kind.__module__ == module.__name__]  # defined there, not imported
    if len(found) != 1:
        raise UserError(f"{path} defines {len(found)} subclasses of Strategy, expected one: see docs/own-strategy.md")
    (kind,) = found
    if "name" not in vars(kind):
        kind.name = path.stem
    return kind
