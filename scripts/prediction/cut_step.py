"""Predict a step with tensor or pipeline parallelism: the pipeline, its messages, the exchange between replicas.

The caller gives each stage's seconds of computing, with its sums over shards: from the operations of its layers
(shapes.py) or from a run's traces (model_parallel_run.py). Transfers are predicted by dist/cost:

- A step with few messages is replayed as a whole (dist/cost/whole_step.py): replicas and shards share ports, a slow
  port delays only its own stages, and some model shards are exchanged while others still compute.
- A step with more messages would take seconds to replay. Its pipeline is simulated with a fixed time per message, that
  of the slowest boundary when all ranks send (dist/cost/model_parallel.py), and model shards are exchanged one by one.
- So is an exchange that overlaps with computing or takes place in each microbatch, as it cannot be replayed.
- With replicas alone there is one exchange, which predicted_exchange replays.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dist.cost.memory import VECTOR_BYTES, RankMemory
from dist.cost.model import Cluster
from dist.cost.model_parallel import Head, Seats, simulate
from dist.cost.overlap import BACKWARD, Training
from dist.cost.whole_step import PipelineStep, WholeStep
from gpt2.config import GPT2Config
from gpt2.parameters import Layout
from gpt2.pipeline import Actions, operations
from scripts.prediction.predictor import exchanged_stages, predicted_exchange, predicted_rows
from scripts.settings.memory import bytes_beside, bytes_of_slots
from scripts.settings.model_parallel import ModelCut
from strategies import Strategy

FEW = 8  # simulated microbatches per stage; each further one takes as long as one of their second half
# A replay takes 20 us per message, more if many are under way at once. Each shape needs a replay, and each strategy the
# end of one.
MOST_REPLAYED = 20_000  # messages times ranks


@dataclass(frozen=True)
class PlacedShard:
    """A model shard: its stage, its tensor-parallel rank, its layout, and the cluster of the ranks that hold it."""

    stage: int
    part: int
    layout: Layout
    cluster: Cluster

    @cached_property
    def ranges(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.layout.held_ranges)


@dataclass(frozen=True)
class CutStep:
    """A step of a model that ranks share: the cut of the model, the ranks' places, the stages' computing.

    batch_size, length: a microbatch's, in sequences and tokens. training: the whole model's, without its compute_s.
    stage_s: (p,) seconds of a microbatch's forward and backward in each stage, with its sums over shards. library:
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
    def shards(self) -> list[PlacedShard]:
        """All model shards, by stage, then by tensor-parallel rank."""
        places = [(stage, part) for stage in range(self.cut.pipeline) for part in range(self.cut.tensor)]
        return [
            PlacedShard(stage, part, Layout(self.config, 1, shard), self.seats.data_cluster(stage, part))
            for (stage, part), shard in zip(places, self.cut.shards, strict=True)
        ]

    # The pipeline.

    @cached_property
    def is_replayed(self) -> bool:
        """True if the messages between stages are few enough to be replayed."""
        boundaries = (self.cut.pipeline - 1) * self.cut.tensor * self.seats.copies
        return self.cut.tensor * self.cut.pipeline > 1 and self._are_few(2 * boundaries * self.simulated.micro_steps)

    def _are_few(self, messages: int) -> bool:
        return messages * self.seats.nodes.size <= MOST_REPLAYED

    @cached_property
    def ends_s(self) -> np.ndarray:
        """The times when the stages have computed all microbatches, (p,)."""
        if self.is_replayed:
            few = self.simulated.micro_steps
            return self._of_all(lambda count: (self._few_replayed if count == few else self._new_replay(count)).ends_s)
        head = Head(self.seats.head_s(self.embedding), self._head_share())
        ends_s = self._of_all(lambda micro_steps: self._simulated_s(micro_steps, self.seats.hop_s(self.rows), head))
        return ends_s + max(0.0, self.cut.micro_steps * self.seats.ports_s(self.rows) - ends_s.max())

    @cached_property
    def unhindered_s(self) -> np.ndarray:
        """ends_s if messages between stages took no time, (p,)."""
        return self._of_all(lambda micro_steps: self._simulated_s(micro_steps, 0.0, Head()))

    def _of_all(self, ends_s_of) -> np.ndarray:
        """Extrapolate ends_s_of(count), the times (p,) after `count` microbatches, to all microbatches."""
        few = self.simulated.micro_steps
        more = self.cut.micro_steps - few
        ends_s = ends_s_of(few)
        return ends_s + more * (ends_s - ends_s_of(few // 2)) / (few - few // 2) if more else ends_s

    def _simulated_s(self, micro_steps: int, hop_s: float, head: Head) -> np.ndarray:
        return np.array(simulate(self._plans(micro_steps), *self._seconds, hop_s, head))

    @cached_property
    def _few_replayed(self) -> WholeStep:
        return self._new_replay(self.simulated.micro_steps)

    def _new_replay(self, micro_steps: int) -> WholeStep:
        pipeline = PipelineStep(self._plans(micro_steps), *self._seconds, self.rows, self.embedding, self._head_share())
        return WholeStep(pipeline, self.seats, self.library)

    def _plans(self, micro_steps: int) -> list[Actions]:
        cut = replace(self.cut, micro_steps=micro_steps)
        return [cut.actions(stage) for stage in range(cut.pipeline)]

    @property
    def _seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a microbatch's forward and of its backward, (p,) each."""
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
        if self.is_replayed and kind.traits.keeps_gradients and not overlaps:
            stages = {}
            for shard in self.shards:
                training = self._training_of(shard)
                placement = shard.cluster.placement
                stages[shard.stage, shard.part] = exchanged_stages(kind, placement, training, self.library)
            if self._are_few(sum(one.repeat * len(one.size) for of in stages.values() for one in of)):
                return self._few_replayed.end_s(stages) - float(self._few_replayed.ends_s.max())
        through = (self.ends_s[shard.stage] + self._exposed_s(kind, shard, overlaps) for shard in self._decisive_shards)
        return float(max(through) - self.ends_s.max())

    @cached_property
    def _decisive_shards(self) -> list[PlacedShard]:
        """The model shards whose exchange may end last.

        Among shards on equal places, a shard does not count if another is at least as large and ready later.
        """
        alike = {}
        for shard in self.shards:
            of = shard.cluster.placement, shard.cluster.rate_in, shard.cluster.rate_out
            alike.setdefault(tuple(tuple(np.ravel(one)) for one in of), []).append(shard)
        found = []
        for group in alike.values():
            group.sort(key=lambda shard: (shard.layout.count, self.ends_s[shard.stage]), reverse=True)
            latest_s = -1.0
            for shard in group:
                if self.ends_s[shard.stage] > latest_s:
                    latest_s = self.ends_s[shard.stage]
                    found.append(shard)
        return found

    def _exposed_s(self, kind: type[Strategy], shard: PlacedShard, overlaps: bool) -> float:
        """Return the exposed exchange of one model shard, in seconds."""
        training = self._training_of(shard)
        exchange_s = exchange_seconds(kind, shard.cluster, training, self.library)
        rows = predicted_rows(kind, shard.cluster, training, self.library)
        overlap = kind.traits.overlap(training if rows else replace(training, rows=None)) if overlaps else None
        if overlap is None:
            return exchange_s
        exposed_s = overlap.step_s(exchange_s, training.compute_s) - training.compute_s
        return exposed_s + (rows.seconds if rows else 0.0)

    def _training_of(self, shard: PlacedShard) -> Training:
        compute_s = float(self.cut.micro_steps * self.stage_s[shard.stage])
        return replace(
            self.training, parameters=shard.layout.count, ranges=shard.ranges, micro_steps=self.cut.micro_steps,
            compute_s=compute_s, rows=self.training.rows if self.cut.tensor == self.cut.pipeline == 1 else None,
        )  # fmt: skip

    def updated_share(self, kind: type[Strategy], overlaps: bool) -> float:
        """Return the largest share of the whole model that one rank updates."""
        amounts = []
        for shard in self.shards:
            count = shard.layout.count
            share = self._held(kind, shard, overlaps).updated_share(count)
            amounts.append(count / self.training.parameters * share)
        return max(amounts)

    # Memory.

    def _held(self, kind: type[Strategy], shard: PlacedShard, overlaps: bool) -> RankMemory:
        return kind.traits.memory.of_rank(shard.layout.count, self.seats.copies, shard.cluster.nodes, overlaps)

    def memory_bytes(self, kind: type[Strategy], overlaps: bool = False) -> int:
        """Return the most bytes that a rank holds under 1F1B, counted as in scripts/settings/memory.py.

        With 1F1B the microbatches in flight do not grow with the number of microbatches.
        """
        return max(
            self._held(kind, shard, overlaps).total + beside
            for shard, beside in zip(self.shards, self._other_bytes, strict=True)
        )

    @cached_property
    def _other_bytes(self) -> list[int]:
        """The bytes of each model shard that do not depend on the strategy."""
        shape = self.batch_size, self.length, self.simulated.micro_steps
        found = [bytes_beside(shard.layout, self.simulated.in_flight(shard.stage), *shape) for shard in self.shards]
        if len(found) > 1:
            found[0] += bytes_of_slots(Layout(self.config))
        return found


def exchange_seconds(kind: type[Strategy], cluster: Cluster, training: Training, library: str) -> float:
    """Return the seconds of a step's exchange. Raise UnknownChoice if they are unknown.

    A strategy that exchanges in each microbatch is predicted for one and for two, and extrapolated.
    """
    if kind.traits.keeps_gradients or training.micro_steps <= 2:
        return predicted_exchange(kind, cluster, training, library).seconds
    one, two = (
        predicted_exchange(kind, cluster, replace(training, micro_steps=count), library).seconds for count in (1, 2)
    )
    return two + (training.micro_steps - 2) * (two - one)
