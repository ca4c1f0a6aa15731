"""Which ranks share a model: how many copies, parts and stages there are, and where each rank is among them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

AXES = ("copy", "part", "stage")  # as identity["mesh"] counts them


@dataclass(frozen=True)
class Mesh:
    """Of the R ranks of a run. copies, parts, stages: how many; copy, part, stage: (R,) int64, where each rank is."""

    copies: int
    parts: int
    stages: int
    copy: np.ndarray
    part: np.ndarray
    stage: np.ndarray

    @cached_property
    def order(self) -> np.ndarray:
        """(R,) indices of the ranks by copy, then stage, then part: as a pipeline is drawn."""
        return np.lexsort((self.part, self.stage, self.copy))

    def name(self, place: int) -> str:
        """ "copy 1 stage 0 part 1", of the rank with this index: what there are several of."""
        counts = {"copy": self.copies, "stage": self.stages, "part": self.parts}
        return " ".join(f"{axis} {getattr(self, axis)[place]}" for axis, count in counts.items() if count > 1)


def mesh_of(identities: list[dict]) -> Mesh | None:
    """Of checked identities; None where each rank has a model of its own, or where they disagree."""
    if any(identity.get("mesh") != identities[0].get("mesh") for identity in identities) or "mesh" not in identities[0]:
        return None
    places = (np.array([identity[axis] for identity in identities]) for axis in AXES)
    return Mesh(*identities[0]["mesh"], *places)
