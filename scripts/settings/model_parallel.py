"""Derive from the flags how ranks share a model, in tensor-parallel shards and pipeline stages, and check the flags."""

from dataclasses import dataclass, replace

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.model_shards import ModelShard, model_shards
from gpt2.pipeline import SCHEDULES, Actions, bubble, layers_by_flops, most_in_flight
from scripts.settings.training import Settings
from strategies import find, is_auto


@dataclass(frozen=True)
class ModelCut:
    """How a model is cut for `tensor` x `pipeline` ranks: into stages, and each stage into tensor-parallel shards.

    layers: the number of layers of each stage. schedule: one of gpt2.pipeline.SCHEDULES. micro_steps: microbatches per
    step.
    """

    tensor: int
    pipeline: int
    layers: tuple[int, ...]
    schedule: str
    micro_steps: int

    @property
    def shards(self) -> list[ModelShard]:
        """The model shards of all ranks, stage by stage."""
        return model_shards(self.layers, self.tensor)

    def actions(self, stage: int) -> Actions:
        """Return the actions of a stage in a step, in order."""
        return SCHEDULES[self.schedule](stage, self.pipeline, self.micro_steps)

    def in_flight(self, stage: int) -> int:
        """Return how many microbatches' activations a stage holds at once."""
        return most_in_flight(self.actions(stage))

    def text(self, copies: int) -> str | None:
        """Describe the cut for the printed table; None if each rank has a whole model."""
        if self.tensor * self.pipeline == 1:
            return None
        counts = (copies, "replica", "replicas"), (self.tensor, "shard", "shards"), (self.pipeline, "stage", "stages")
        text = " x ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts)
        if self.pipeline == 1:
            return text
        text += f" of {', '.join(map(str, self.layers))} layers; {self.schedule}, {self.micro_steps} microbatches"
        text += f", bubble {bubble(self.pipeline, self.micro_steps):.0%} of a step"
        if self.micro_steps < self.pipeline:
            text += f", as there are fewer microbatches than stages: raise --grad-accum ({self.micro_steps})"
        return text


def model_cut(settings: Settings, config: GPT2Config) -> ModelCut:
    """Return how complete settings cut the model."""
    layers = (config.n_layer,)
    if settings.pipeline_layers:
        layers = tuple(map(int, settings.pipeline_layers.split(",")))
    return ModelCut(
        tensor=settings.tensor_parallel,
        pipeline=settings.pipeline_parallel,
        layers=layers,
        schedule=settings.pipeline_schedule,
        micro_steps=settings.grad_accum,
    )


def is_cut(settings: Settings) -> bool:
    """Return whether several ranks share one model."""
    return model_ranks(settings) > 1


def model_ranks(settings: Settings) -> int:
    """Return how many ranks share one model."""
    return settings.tensor_parallel * settings.pipeline_parallel


def copies(settings: Settings, ranks: int) -> int:
    """Return the number of data-parallel replicas. Each takes its share of a global batch."""
    return ranks // model_ranks(settings)


def with_layers(settings: Settings, config: GPT2Config, ranks: int) -> Settings:
    """Decide the layers of each stage. Return the settings. Raise UserError if the model or the ranks do not divide."""
    check_cut(settings, config, ranks)
    least_last = 0 if settings.tensor_parallel == 1 else 1
    if settings.pipeline_layers is not None:
        check_layers(model_cut(settings, config).layers, config, settings.pipeline_parallel, least_last)
    elif settings.pipeline_parallel > 1:
        layers = layers_by_flops(config, settings.pipeline_parallel, settings.seq_len, least_last)
        settings = replace(settings, pipeline_layers=",".join(map(str, layers)))
    return settings


def check_cut(settings: Settings, config: GPT2Config, ranks: int) -> None:
    """Raise UserError if tensor-parallel shards or stages do not fit the model, the ranks or other flags."""
    parts = settings.tensor_parallel
    stages = settings.pipeline_parallel
    if ranks % model_ranks(settings):
        nearest = max(1, round(ranks / model_ranks(settings))) * model_ranks(settings)
        raise UserError(
            f"{ranks} ranks with --tensor-parallel {parts} and --pipeline-parallel {stages}, expected a multiple of "
            f"{model_ranks(settings)}: start {nearest}, or split the model differently"
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
    if is_cut(settings) and not is_auto(settings.strategy) and not find(settings.strategy).traits.shares_models:
        raise UserError(
            f"--strategy {settings.strategy} with several ranks sharing a model, expected a model in each rank: use "
            "another strategy, or --tensor-parallel 1 --pipeline-parallel 1"
        )
    if is_cut(settings) and settings.server == "dedicated":
        raise UserError(
            "--server dedicated with several ranks sharing a model, which all compute: leave it out, or use "
            "--tensor-parallel 1 --pipeline-parallel 1"
        )


def check_layers(layers: tuple[int, ...], config: GPT2Config, stages: int, least_last: int) -> None:
    """Raise UserError unless --pipeline-layers has a number per stage and the numbers add up to the model's layers."""
    found = ",".join(map(str, layers))
    if len(layers) != stages:
        raise UserError(
            f"--pipeline-layers {found} has {len(layers)} stages, expected {stages} (--pipeline-parallel): give a "
            "number for each"
        )
    if sum(layers) != config.n_layer:
        raise UserError(
            f"--pipeline-layers {found} add up to {sum(layers)}, expected the model's {config.n_layer}: change one"
        )
    if not all(layers[:-1]) or layers[-1] < least_last:
        why = "with tensor parallelism also the last" if least_last else "the last, which has the head, may have none"
        raise UserError(f"--pipeline-layers {found} leaves a stage empty, expected a layer in each ({why}): move one")
