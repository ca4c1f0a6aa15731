"""How a run's model is cut over its ranks: what the flags say, what they leave open, and what does not go together."""

from dataclasses import dataclass, replace

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.model_shards import ModelShard, model_shards
from gpt2.pipeline import SCHEDULES, Actions, bubble, layers_by_flops, most_in_flight
from scripts.settings.training import Settings


@dataclass(frozen=True)
class ModelCut:
    """A model over tensor x pipeline ranks: the parts of each stage's tensors, and the stages.

    layers: how many each stage has. schedule: one of gpt2.pipeline.SCHEDULES, for so many micro-steps.
    """

    tensor: int
    pipeline: int
    layers: tuple[int, ...]
    schedule: str
    micro_steps: int

    @property
    def shards(self) -> list[ModelShard]:
        """Stage by stage, and part by part."""
        return model_shards(self.layers, self.tensor)

    def actions(self, stage: int) -> Actions:
        """What a stage does in a step, in order."""
        return SCHEDULES[self.schedule](stage, self.pipeline, self.micro_steps)

    def in_flight(self, stage: int) -> int:
        """Of how many micro-steps a stage holds activations at once."""
        return most_in_flight(self.actions(stage))

    def text(self, copies: int) -> str | None:
        """What the cut comes to, for the printed table; None where each rank has a whole model."""
        if self.tensor * self.pipeline == 1:
            return None
        counts = (copies, "copy", "copies"), (self.tensor, "part", "parts"), (self.pipeline, "stage", "stages")
        text = " x ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts)
        if self.pipeline == 1:
            return text
        text += f" of {', '.join(map(str, self.layers))} layers; {self.schedule}, {self.micro_steps} micro-steps"
        text += f", bubble {bubble(self.pipeline, self.micro_steps):.0%} of a step"
        if self.micro_steps < self.pipeline:
            text += f", as there are fewer micro-steps than stages: raise --grad-accum ({self.micro_steps})"
        return text


def model_cut(s: Settings, config: GPT2Config) -> ModelCut:
    """Of settings that are complete."""
    layers = tuple(map(int, s.pipeline_layers.split(","))) if s.pipeline_layers else (config.n_layer,)
    return ModelCut(s.tensor_parallel, s.pipeline_parallel, layers, s.pipeline_schedule, s.grad_accum)


def is_cut(s: Settings) -> bool:
    """Whether several ranks share one model."""
    return model_ranks(s) > 1


def model_ranks(s: Settings) -> int:
    """How many ranks share one model."""
    return s.tensor_parallel * s.pipeline_parallel


def copies(s: Settings, ranks: int) -> int:
    """How many models the ranks hold, each of which takes its share of a global batch."""
    return ranks // model_ranks(s)


def with_layers(s: Settings, config: GPT2Config, ranks: int) -> Settings:
    """The settings with the layers of each stage. UserError if the model, or the ranks, cannot be cut so."""
    check_cut(s, config, ranks)
    least_last = 0 if s.tensor_parallel == 1 else 1
    if s.pipeline_layers is not None:
        check_layers(model_cut(s, config).layers, config, s.pipeline_parallel, least_last)
    elif s.pipeline_parallel > 1:
        layers = layers_by_flops(config, s.pipeline_parallel, s.seq_len, least_last)
        s = replace(s, pipeline_layers=",".join(map(str, layers)))
    return s


def check_cut(s: Settings, config: GPT2Config, ranks: int) -> None:
    """UserError if the parts or stages do not fit the model, the ranks or the other flags."""
    parts, stages = s.tensor_parallel, s.pipeline_parallel
    for flag, count in (("tensor", parts), ("pipeline", stages)):
        if count < 1:
            raise UserError(f"--{flag}-parallel is {count}, expected a number of at least 1")
    if ranks % model_ranks(s):
        nearest = max(1, round(ranks / model_ranks(s))) * model_ranks(s)
        raise UserError(
            f"{ranks} ranks with --tensor-parallel {parts} and --pipeline-parallel {stages}, expected a multiple of "
            f"{model_ranks(s)}: start {nearest}, or cut the model otherwise"
        )
    if parts > config.n_head:
        raise UserError(f"--tensor-parallel {parts}, expected at most the model's {config.n_head} heads: lower it")
    most = config.n_layer + (parts == 1)
    if stages > most:
        alone = ", and a last stage with the head alone" if parts == 1 else ""
        raise UserError(
            f"--pipeline-parallel {stages}, expected at most {most}: the model has {config.n_layer} layers{alone}: "
            "lower it"
        )
    if is_cut(s) and s.server == "dedicated":
        raise UserError(
            "--server dedicated where several ranks share a model, whose ranks all compute: leave it out, or use "
            "--tensor-parallel 1 --pipeline-parallel 1"
        )


def check_layers(layers: tuple[int, ...], config: GPT2Config, stages: int, least_last: int) -> None:
    """UserError unless the layers of --pipeline-layers are those of so many stages, and add up to the model's."""
    found = ",".join(map(str, layers))
    if len(layers) != stages:
        raise UserError(
            f"--pipeline-layers {found} has {len(layers)} stages, expected {stages} (--pipeline-parallel): give a "
            "number for each"
        )
    if sum(layers) != config.n_layer:
        raise UserError(
            f"--pipeline-layers {found} come to {sum(layers)}, expected the model's {config.n_layer} layers: change one"
        )
    if not all(layers[:-1]) or layers[-1] < least_last:
        why = "the last, which has the head, may have none" if least_last == 0 else "with parts the last one, too"
        raise UserError(f"--pipeline-layers {found} leaves a stage empty, expected a layer in each ({why}): move one")
