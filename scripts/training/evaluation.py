"""A model's evaluations over all ranks: each takes its part, and the sums meet. All are collective."""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dist.waiting import sum_everywhere
from dist.world import threads_per_rank
from gpt2.data import windows
from gpt2.data.shards import open_shards
from gpt2.data.texts import join_tokens, read_text
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.inference.evaluation import Scorer, perplexity, strided_windows, text_losses
from gpt2.inference.evaluation_choices import check_examples, count_correct, read_examples
from gpt2.inference.generated_text import document_start
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.parameters import Layout, Parameters
from scripts.backends.choose import choose_kernels
from scripts.settings.tokenizer import choose_tokenizer
from scripts.training.worker import Worker

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Model:
    """`parameters` where the `kernels` want them, and the length of a sequence, at most the model's context."""

    kernels: object
    parameters: Parameters
    sequence_length: int

    @property
    def config(self):
        return self.parameters.layout.config


def load_model(settings, world) -> Model:
    """All parameters on each rank, on its GPU if that is what it computes on."""
    threads = settings.threads or threads_per_rank(world)
    with world.together(UserError):
        path = Path(settings.model)
        config = weights.read_config(path)
        length = settings.seq_len or config.context
        if length > config.context:
            raise UserError(f"--seq-len is {length}, expected at most the model's context, {config.context}: lower it")
        if (settings.stride or 1) > length:
            raise UserError(f"--stride is {settings.stride}, expected at most --seq-len, {length}: lower it")
        weights.check_memory(path, config, world.local_size)
    kernels, _ = choose_kernels(settings.backend, config, world, threads)
    with world.together(UserError):
        parameters = Parameters.zeros(Layout(config))
        weights.read_parameters(path, parameters)
        if kernels is None:
            return Model(load_kernels("numpy", threads), parameters, length)
        flat = kernels.empty(parameters.flat.shape)
        flat.set(parameters.flat)
        return Model(kernels, Parameters(parameters.layout, flat), length)


def of_validation(model: Model, settings, world) -> dict:
    """Of --val-data, by the code that validates while training."""
    with world.together(UserError):
        val = Windows(open_shards(settings.val_data), model.sequence_length)
        windows.check_tokens(val.shards, model.config.vocab_size, world.rank, world.size)
        gpt2 = GPT2(model.kernels, model.parameters, None, settings.batch_size, model.sequence_length)
        worker = Worker(gpt2, val, val, 1, world.rank, world.size, None)
        part = worker.validation_loss(0)
    total, tokens = sum_everywhere(world.comm, *part)
    return {"loss": total / tokens, "perplexity": perplexity(total / tokens), "tokens": int(tokens)}


def of_text(model: Model, settings, world) -> dict:
    """Of --text: token by token, and in bits for each byte of it, which does not depend on the tokenizer."""
    with world.together(UserError):
        encoding = choose_tokenizer(settings.tokenizer, Path(settings.model), model.config.vocab_size)
        text = read_text(settings.text)
        tokens = join_tokens(["", text], encoding)
        stride = settings.stride or max(1, model.sequence_length // 2)
        parts = strided_windows(len(tokens), model.sequence_length, stride)[world.rank :: world.size]
        part = text_losses(new_scorer(model, settings, world, "text"), tokens, parts)
    (total,) = sum_everywhere(world.comm, part)
    count, size = len(tokens) - len(document_start(encoding)), len(text.encode("utf-8"))
    return {
        "loss": total / count, "perplexity": perplexity(total / count), "bits_per_byte": total / math.log(2) / size,
        "tokens": count, "bytes": size,
    }  # fmt: skip


def of_choices(model: Model, settings, world) -> dict:
    """Of --hellaswag: both accuracies, each with its standard error."""
    with world.together(UserError):
        examples = read_examples(settings.hellaswag)
        check_examples(settings.hellaswag, examples, model.config)
        scorer = new_scorer(model, settings, world, "hellaswag")
        # Dealt one by one: in HellaSwag the long examples come last.
        part = count_correct(scorer, examples[world.rank :: world.size])
    correct, normalized = sum_everywhere(world.comm, *part)
    count = len(examples)
    return {
        "acc": correct / count, "acc_norm": normalized / count, "acc_stderr": standard_error(correct / count, count),
        "acc_norm_stderr": standard_error(normalized / count, count), "examples": count,
    }  # fmt: skip


def standard_error(share: float, count: int) -> float:
    return math.sqrt(share * (1 - share) / count)


def new_scorer(model: Model, settings, world, name: str) -> Scorer:
    """Its rank 0 says from time to time how far it is."""
    said = time.monotonic()

    def report(done, total):
        nonlocal said
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"{name}: {done:,} of rank 0's {total:,} rows", file=sys.stderr, flush=True)

    return Scorer(model.kernels, model.parameters, settings.batch_size, None if world.rank else report)
