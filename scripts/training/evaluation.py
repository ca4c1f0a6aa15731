"""The measurements of evaluate.py. Each rank evaluates its share, then the ranks add up their sums.

All functions are collective. prepare_validation, prepare_text and prepare_choices read and check their input and return
a function that measures, so a mistake in any input ends the job before the first measurement.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dist.console import say
from dist.waiting import sum_everywhere
from dist.world import threads_per_rank
from gpt2.data import windows
from gpt2.data.shards import open_shards
from gpt2.data.texts import join_tokens, read_documents
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.inference.evaluation import Scorer, perplexity, strided_windows, text_losses
from gpt2.inference.evaluation_choices import check_examples, count_correct, read_examples
from gpt2.inference.generated_text import document_start
from gpt2.kernels import load_kernels
from gpt2.model import GPT2
from gpt2.parameters import Layout, Parameters
from gpt2.pipeline import SCHEDULES
from scripts.backends.choose import choose_kernels
from scripts.backends.gpus import on_own_gpu
from scripts.settings.memory import check_parameters
from scripts.settings.sequence_length import choose_sequence_length
from scripts.settings.tokenizer import check_tokens, choose_tokenizer, tokenizer_of, tokenizer_of_shards
from scripts.training.same_files import check_same_files, found_for_all
from scripts.training.worker import Worker

SECONDS_BETWEEN_LINES = 10.0
PLAIN = SCHEDULES["1f1b"](0, 1, 1)  # the actions of a model with one stage and one microbatch


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate."""

    path: Path  # file or folder of the weights
    kernels: object  # for the memory that holds the parameters: host or GPU
    parameters: Parameters
    sequence_length: int  # at most the model's context
    stride: int  # tokens from one window of a text to the next, at most sequence_length
    batch_size: int  # sequences per forward pass of a rank
    longest: int  # tokens of the longest --hellaswag row that is accepted

    @property
    def config(self):
        return self.parameters.layout.config


def load_model(
    path: Path, sequence_length: int | None, stride: int | None, batch_size: int, backend: str, dtype: str,
    threads: int, world,
) -> EvaluatedModel:  # fmt: skip
    """Load all parameters on each rank, on its GPU if it computes on one.

    sequence_length: None for the trained length if known, else the context; rank 0 prints which. stride: None for half
    a sequence. dtype: of the operands of products, on cores. threads: 0 for the rank's share of its node's cores.
    """
    threads = threads or threads_per_rank(world)
    path = found_for_all(world, path)
    with world.together(UserError):
        config = weights.read_config(path)
        length, remark = choose_sequence_length(sequence_length, path, config)
        longest = max(length, *(weights.trained_lengths(path) or (0, config.context)))
        stride = stride or max(1, length // 2)
        if stride > length:
            raise UserError(f"--stride is {stride}, expected at most --seq-len, {length}: lower it")
        check_parameters(path, config, world.local_size)
        files = weights.files(path)
    if world.rank == 0 and remark:
        say(remark, on_stderr=True)
    check_same_files(world, files)
    kernels, _ = choose_kernels(backend, Layout(config), world, threads)
    with world.together(UserError):
        if kernels is not None and dtype != "float32":
            raise UserError(f"--dtype {dtype} on a GPU, where models are evaluated in float32: use --backend numpy")
        parameters = Parameters.zeros(Layout(config))
        weights.read_parameters(path, parameters)
        if kernels is None:
            kernels = load_kernels("numpy", threads, dtype=dtype)
        else:
            parameters = on_own_gpu(kernels, parameters)
        return EvaluatedModel(path, kernels, parameters, length, stride, batch_size, longest)


def prepare_validation(model: EvaluatedModel, shards: str, tokenizer: str | None, world) -> Callable[[], dict]:
    """Prepare --val-data: the validation loss, computed as in training. shards: glob of the token shards."""
    with world.together(UserError):
        check_tokens(shards, tokenizer_of_shards(shards), tokenizer or tokenizer_of(model.path))
        val = Windows(open_shards(shards), model.sequence_length)
    check_same_files(world, [shard.path for shard in val.shards])
    with world.together(UserError):
        windows.check_tokens(val.shards, model.config.vocab_size, world.rank, world.size)

    def measure() -> dict:
        with world.together(UserError):
            gpt2 = GPT2(model.kernels, model.parameters, None, model.batch_size, model.sequence_length)
            part = Worker(gpt2, val, val, PLAIN, world.rank, world.size, None).validation_loss(0)
        total, tokens = sum_everywhere(world.comm, *part)
        return {"loss": total / tokens, "perplexity": perplexity(total / tokens), "tokens": int(tokens)}

    return measure


def prepare_text(model: EvaluatedModel, path: Path, tokenizer: str | None, splits: bool, world) -> Callable[[], dict]:
    """Prepare --text: the loss per token, and bits per byte, which do not depend on the tokenizer."""
    with world.together(UserError):
        encoding = choose_tokenizer(tokenizer, model.path, model.config.vocab_size)
        documents, files, remarks = read_documents(path, splits)
    if world.rank == 0 and str(remarks):
        say(remarks, on_stderr=True)
    check_same_files(world, files)

    def measure() -> dict:
        with world.together(UserError):
            tokens = join_tokens(["", *documents], encoding)
            parts = strided_windows(len(tokens), model.sequence_length, model.stride)[world.rank :: world.size]
            part = text_losses(new_scorer(model, world, "text"), tokens, parts)
        (total,) = sum_everywhere(world.comm, part)
        count = len(tokens) - len(document_start(encoding))
        size = sum(len(document.encode("utf-8")) for document in documents)
        return {
            "loss": total / count, "perplexity": perplexity(total / count), "bits_per_byte": total / math.log(2) / size,
            "tokens": count, "bytes": size,
        }  # fmt: skip

    return measure


def prepare_choices(model: EvaluatedModel, path: Path, tokenizer: str | None, world) -> Callable[[], dict]:
    """Prepare --hellaswag: both accuracies, each with its standard error."""
    with world.together(UserError):
        check_tokens(path, "gpt2", tokenizer or tokenizer_of(model.path))
        examples = read_examples(path)
    check_same_files(world, [path])
    with world.together(UserError):
        check_examples(path, examples, model.config, model.longest)

    def measure() -> dict:
        with world.together(UserError):
            scorer = new_scorer(model, world, "hellaswag")
            # Deal the examples out in turn: HellaSwag has its long examples at the end.
            part = count_correct(scorer, examples[world.rank :: world.size])
        count = len(examples)
        acc, acc_norm = (correct / count for correct in sum_everywhere(world.comm, *part))
        errors = [math.sqrt(share * (1 - share) / count) for share in (acc, acc_norm)]
        return {
            "acc": acc, "acc_norm": acc_norm, "acc_stderr": errors[0], "acc_norm_stderr": errors[1], "examples": count,
        }  # fmt: skip

    return measure


def new_scorer(model: EvaluatedModel, world, name: str) -> Scorer:
    """Return the function that scores a rank's rows. Rank 0's function prints progress from time to time."""
    said = time.monotonic()

    def report(done, total):
        nonlocal said
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            say(f"{name}: {done:,} of rank 0's {total:,} rows", on_stderr=True)

    return Scorer(model.kernels, model.parameters, model.batch_size, None if world.rank else report)
