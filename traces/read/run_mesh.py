"""The ranks' places in models that they share: data-parallel replica, tensor-parallel shard and pipeline stage."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

AXES = ("copy", "part", "stage")  # the names that traces use


@dataclass(frozen=True)
class RunMesh:
    """replicas, shards, stages: how many. replica, shard, stage: (R,) int64, each rank's place among them."""

    replicas: int
    shards: int
    stages: int
    replica: np.ndarray
    shard: np.ndarray
    stage: np.ndarray

    @cached_property
    def order(self) -> np.ndarray:
        """(R,) indices of the ranks sorted by replica, stage and shard: the order in which a pipeline is drawn."""
        return np.lexsort((self.shard, self.stage, self.replica))

    def name(self, place: int) -> str:
        """Name the rank with this index, "replica 1 stage 0 shard 1", without axes that have only one place."""
        counts = {"replica": self.replicas, "stage": self.stages, "shard": self.shards}
        return " ".join(f"{axis} {getattr(self, axis)[place]}" for axis, count in counts.items() if count > 1)


def mesh_of(identities: list[dict]) -> RunMesh | None:
    """Build the mesh from checked identities. None if each rank has its own model, or if they disagree."""
    counts = identities[0].get("mesh")
    if counts is None or any(identity.get("mesh") != counts for identity in identities):
        return None
    places = (np.array([identity[axis] for identity in identities]) for axis in AXES)
    return RunMesh(*counts, *places)
