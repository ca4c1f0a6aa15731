"""The checkpoints of a run of one rank, without MPI: collectives are over at once, and a strategy is its state.

run = one_rank(tmp_path)
run.save(2)              # a checkpoint after step 2
run.arrays["m"][:] = 3   # change the state
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dist.world import World
from gpt2.formats import checkpoints
from gpt2.optimizer import Clipping
from gpt2.parameters import Layout, Parameters
from scripts.training.checkpointing import Checkpointing
from scripts.training.whole_model import WholeModel
from strategies.base import Updated
from strategies.traits import Traits
from tests.support.safetensors_file import CONFIG


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def allgather(self, one):
        return [one]

    def Iallgather(self, own, gathered):
        gathered[:] = own
        return SimpleNamespace(Test=lambda: True)


WORLD = World(Alone(), Alone(), 0, 1, 0, 1, 0, 1, "cn0", [{"rank": 0, "node": 0, "host": "cn0", "local_rank": 0}])


@dataclass
class OneRank:
    """arrays: the state, by its name in a checkpoint, (count,) float32. model: as the training's."""

    folder: Path
    layout: Layout
    arrays: dict[str, np.ndarray]
    checkpoints: Checkpointing
    model: WholeModel
    strategy: SimpleNamespace

    def save(self, step: int, goes_on: bool = True) -> None:
        """Write a checkpoint, as far as that works, and return when that is over. goes_on: as Checkpointing.begin's."""
        self.checkpoints.begin(step, goes_on)
        self.checkpoints.settle(self.wait())
        self.close()

    def wait(self) -> list[int]:
        """What the rank has written when it writes no more."""
        while not self.checkpoints.written():
            pass
        return [self.checkpoints.written()]

    def close(self) -> None:
        """Return when the thread has done all that it was asked for."""
        if completing := self.checkpoints._completing:
            completing.exception()

    def names(self) -> list[str]:
        """What lies in the folder, complete or not."""
        return sorted(path.name for path in self.folder.iterdir())


def one_rank(folder: Path, every: int | None = 2, keep: int = 9) -> OneRank:
    """A run of the steps 1 to 6, all of whose state is 1."""
    layout = Layout(CONFIG)
    arrays = {name: np.ones(layout.count, np.float32) for name in ("parameters", "m", "v", "errors_0")}
    optimizer = SimpleNamespace(step=1, moments=lambda: [(0, arrays["m"], arrays["v"])])
    strategy = SimpleNamespace(
        state=lambda: [Updated(0, arrays["parameters"], optimizer)],
        errors=lambda: arrays["errors_0"],
        own_arrays=tuple,
        traits=Traits(),
        clipping=Clipping(1.0),
        resumed=lambda: None,
    )
    facts = {"run": "f" * 32, "global_batch": 1} | checkpoints.model_facts(layout)
    path = folder / "checkpoints"
    path.mkdir(parents=True)
    model = WholeModel(Parameters(layout, arrays["parameters"]), lambda *_: None, lambda *_: None)
    checkpointing = Checkpointing(WORLD, path, strategy, layout, facts, range(1, 7), every, (keep, 0), lambda: None)
    return OneRank(path, layout, arrays, checkpointing, model, strategy)
