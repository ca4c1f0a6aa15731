"""Predict a step with tensor or pipeline parallelism: the pipeline, its messages, the exchange between replicas.

The caller gives each stage's compute time, including its sums over shards: from the operations of its layers
(shapes.py) or from a run's traces (model_parallel_run.py). dist/cost predicts the transfers:

- A pipeline with few messages is replayed (dist/cost/pipeline_replay.py): replicas and shards share ports, and a slow
  port delays only its own stages. More messages would take seconds to replay, so the pipeline is then simulated with a
  fixed time per message, that of the slowest boundary when all ranks send (dist/cost/model_parallel.py).
- Each stage's replicas exchange when the stage has ended. The exchanges of its shards share the nodes' ports.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dist.cost.memory import VECTOR_BYTES, RankMemory
from dist.cost.model import exchange_seconds
from dist.cost.model_parallel import Head, Seats, simulate
from dist.cost.overlap import BACKWARD, Training
from dist.cost.pipeline_replay import PipelineStep, replayed_ends_s
from dist.cost.stages import side_by_side
from gpt2.config import GPT2Config
from gpt2.parameters import Layout
from gpt2.pipeline import Actions, operations
from scripts.prediction.predictor import exchanged_stages, predicted_rows
from scripts.settings.memory import bytes_beside, bytes_of_slots
from scripts.settings.model_parallel import ModelCut
from strategies import Strategy

FEW = 8  # simulated microbatches per stage; each further one takes the mean time of the second half of these
MOST_REPLAYED = 20_000  # messages times ranks; a replay takes 20 us per message, longer if many are in flight


@dataclass(frozen=True)
class CutStep:
    """A step of a model that ranks share: the cut of the model, the ranks' places, the stages' compute times.

    batch_size, length: sequences of a microbatch, tokens of a sequence. training: of the whole model, compute_s unused.
    stage_s: (p,) seconds of a microbatch's forward and backward in each stage, including sums over shards. library:
    mpich or openmpi.
    """

    config: GPT2Config
    cut: ModelCut
    batch_size: int
    length: int
    seats: Seats
    training: Training
    stage_s: np.ndarray
    library: str

    @cached_property
    def rows(self) -> int:
        """Bytes of a microbatch's activations on the wire."""
        return VECTOR_BYTES * self.batch_size * self.length * self.config.n_embd

    @property
    def embedding(self) -> int:
        """Bytes of the token embedding."""
        return VECTOR_BYTES * self.config.padded_vocab_size * self.config.n_embd

    @cached_property
    def simulated(self) -> ModelCut:
        """The cut, reduced to the simulated number of microbatches."""
        return replace(self.cut, micro_steps=min(self.cut.micro_steps, FEW * self.cut.pipeline))

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layouts of all model shards, by stage, then by tensor-parallel rank."""
        return [Layout(self.config, 1, shard) for shard in self.cut.shards]

    # The pipeline.

    @property
    def is_replayed(self) -> bool:
        """True if there are messages between stages, and few enough to be replayed."""
        messages = 2 * (self.cut.pipeline - 1) * self.cut.tensor * self.seats.copies * self.simulated.micro_steps
        return 0 < messages * self.seats.nodes.size <= MOST_REPLAYED

    @cached_property
    def ends_s(self) -> np.ndarray:
        """The times at which the stages have computed all microbatches, (p,)."""
        if self.is_replayed:
            return self._of_all(self._replayed_s)
        head = Head(self.seats.head_s(self.embedding), self._head_share())
        ends_s = self._of_all(lambda micro_steps: self._simulated_s(micro_steps, self.seats.hop_s(self.rows), head))
        return ends_s + max(0.0, self.cut.micro_steps * self.seats.ports_s(self.rows) - ends_s.max())

    @cached_property
    def unhindered_s(self) -> np.ndarray:
        """What ends_s would be if messages between stages took no time, (p,)."""
        return self._of_all(lambda micro_steps: self._simulated_s(micro_steps, 0.0, Head()))

    def _of_all(self, ends_s_of) -> np.ndarray:
        """Extrapolate ends_s_of(count), the times (p,) after `count` microbatches, to all microbatches."""
        few = self.simulated.micro_steps
        more = self.cut.micro_steps - few
        ends_s = ends_s_of(few)
        return ends_s + more * (ends_s - ends_s_of(few // 2)) / (few - few // 2) if more else ends_s

    def _simulated_s(self, micro_steps: int, hop_s: float, head: Head) -> np.ndarray:
        return np.array(simulate(self._plans(micro_steps), *self._seconds, hop_s, head))

    def _replayed_s(self, micro_steps: int) -> np.ndarray:
        pipeline = PipelineStep(self._plans(micro_steps), *self._seconds, self.rows, self.embedding, self._head_share())
        return replayed_ends_s(pipeline, self.seats, self.library)

    def _plans(self, micro_steps: int) -> list[Actions]:
        cut = replace(self.cut, micro_steps=micro_steps)
        return [cut.actions(stage) for stage in range(cut.pipeline)]

    @property
    def _seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a microbatch's forward, and of its backward, in each stage, (p,) each."""
        return (1 - BACKWARD) * self.stage_s, BACKWARD * self.stage_s

    def _head_share(self) -> float:
        """Return the head's share of the last stage's operations."""
        layer, head = operations(self.config, self.length)
        return head / (self.cut.layers[-1] * layer + head)

    # The replicas.

    def exchange_s(self, kind: type[Strategy], overlaps: bool) -> float:
        """Return the exposed exchange between replicas with this strategy, in seconds. Raise UnknownChoice.

        Gradients are scaled by the norm of the whole model, so all exchanges end before any update begins.
        """
        if self.seats.copies == 1:
            return 0.0
        through = [self.ends_s[stage] + self._exposed_s(kind, stage, overlaps) for stage in self._decisive_stages]
        return float(max(through) - self.ends_s.max())

    @cached_property
    def _decisive_stages(self) -> list[int]:
        """The stages whose exchange may end last: no stage on equal places that ends later has as many parameters."""
        largest = {}
        found = []
        for stage in np.argsort(-self.ends_s).tolist():
            cluster = self.seats.data_cluster(stage)
            places = tuple(tuple(np.ravel(one)) for one in (cluster.placement, cluster.rate_in, cluster.rate_out))
            count = self._largest(stage).count
            if count > largest.get(places, 0):
                largest[places] = count
                found.append(stage)
        return found

    def _largest(self, stage: int) -> Layout:
        """Return the layout of the stage's largest shard."""
        own = self.layouts[stage * self.cut.tensor : (stage + 1) * self.cut.tensor]
        return max(own, key=lambda layout: layout.count)

    def _exposed_s(self, kind: type[Strategy], stage: int, overlaps: bool) -> float:
        """Return the exposed exchange of one stage's shards, in seconds."""
        layout = self._largest(stage)
        is_whole = self.cut.tensor == self.cut.pipeline == 1
        training = replace(
            self.training, parameters=layout.count, ranges=tuple(stop - start for start, stop in layout.held_ranges),
            micro_steps=self.cut.micro_steps, compute_s=float(self.cut.micro_steps * self.stage_s[stage]),
            rows=self.training.rows if is_whole else None, matrices=layout.matrices,
        )  # fmt: skip
        exchange_s = stage_exchange_s(kind, self.seats, stage, training, self.library)
        rows = predicted_rows(kind, self.seats.data_cluster(stage), training, self.library)
        overlap = kind.traits.overlap(training if rows else replace(training, rows=None)) if overlaps else None
        if overlap is None:
            return exchange_s
        exposed_s = overlap.step_s(exchange_s, training.compute_s) - training.compute_s
        return exposed_s + (rows.seconds if rows else 0.0)

    def updated_share(self, kind: type[Strategy], overlaps: bool) -> float:
        """Return the largest share of the whole model that one rank updates."""
        return max(
            layout.count / self.training.parameters * held.updated_share(layout.count)
            for layout, held in zip(self.layouts, self._held(kind, overlaps), strict=True)
        )

    # Memory.

    def _held(self, kind: type[Strategy], overlaps: bool) -> list[RankMemory]:
        """Return what the strategy holds on a rank of each model shard."""
        groups = self.seats.nodes.transpose(0, 2, 1).reshape(len(self.layouts), -1)
        return [
            kind.traits.memory.of_rank(layout.count, self.seats.copies, len(np.unique(nodes)), overlaps)
            for layout, nodes in zip(self.layouts, groups, strict=True)
        ]

    def memory_bytes(self, kind: type[Strategy], overlaps: bool = False) -> int:
        """Return the most bytes that a rank holds under 1F1B, counted as in scripts/settings/memory.py.

        With 1F1B the microbatches in flight do not grow with the number of microbatches.
        """
        held = self._held(kind, overlaps)
        return max(one.total + beside for one, beside in zip(held, self._other_bytes, strict=True))

    @cached_property
    def _other_bytes(self) -> list[int]:
        """The bytes of each model shard that do not depend on the strategy."""
        shape = self.batch_size, self.length, self.simulated.micro_steps
        found = []
        for number, layout in enumerate(self.layouts):
            found.append(bytes_beside(layout, self.simulated.in_flight(number // self.cut.tensor), *shape))
        if len(found) > 1:
            found[0] += bytes_of_slots(Layout(self.config))
        return found


def stage_exchange_s(kind: type[Strategy], seats: Seats, stage: int, training: Training, library: str) -> float:
    """Return the seconds of the exchange of a stage's replicas in a step. Raise UnknownChoice if they are unknown.

    training: of one shard of the stage; all shards exchange at once. A strategy that exchanges in each microbatch is
    predicted for one and for two microbatches, and extrapolated.
    """
    _, placement = np.unique(seats.nodes[stage, :, 0], return_inverse=True)

    def seconds(training: Training) -> float:
        stages = exchanged_stages(kind, placement, training, library)
        return exchange_seconds(side_by_side(stages, seats.parts), seats.data_cluster(stage), library)

    if kind.traits.keeps_gradients or training.micro_steps <= 2:
        return seconds(training)
    one, two = (seconds(replace(training, micro_steps=count)) for count in (1, 2))
    return two + (training.micro_steps - 2) * (two - one)
