"""Every setting of a training run, written once: the fields below make the flags, the printed table and config.json."""

import argparse
from dataclasses import MISSING, asdict, dataclass, field, fields, replace

from dist.world import end_with_one_line, start_mpi
from gpt2.config import GPT2_VOCABULARY, PRESETS, GPT2Config
from gpt2.data.tokenizers import TOKENIZERS
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.optimizer import SCHEDULES
from scripts.reports.event_files import check_tensorboard
from scripts.settings import presets
from strategies import (
    DEVICE_TRANSPORTS,
    OVERLAP_NEEDS_NCCL,
    SERVERS,
    STRATEGIES,
    TRANSPORTS,
    WIRES,
    check_exchange,
    check_rounding,
    check_strategy,
    check_transport,
    check_wire,
    no_overlap,
    worker_count,
)
from traces import RunError
from traces.record.recorder import parse_steps

AUTO = "auto"  # a strategy by model and trial once links are measured; kernels and transport by what is there

DTYPES = ("float32", "bfloat16")


def setting(default, text, **options):
    """A field with its flag's help and argparse options; the type follows the default unless `type` is given."""
    return field(default=default, metadata={"help": text, **options})


def positive(text: str) -> float:
    """A flag's finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    return value


@dataclass(frozen=True)
class Settings:
    """The flags of scripts/train.py. None means: chosen from the others, see the help text."""

    preset: str = setting(
        None, "a known run's settings, see scripts/settings/presets.py", type=str, choices=presets.KNOWN_RUNS
    )
    strategy: str = setting("reduce-scatter", "how gradients are exchanged", choices=(*STRATEGIES, AUTO))
    server: str = setting("colocated", "reduce-bcast: does rank 0 compute too, or only serve", choices=SERVERS)
    wire: str = setting("float32", "what our own exchanges send: bfloat16 halves the bytes", choices=WIRES)
    error_feedback: bool = setting(False, "with --wire bfloat16: add what rounding loses to the next step's gradients")
    overlap: bool = setting(False, "exchange while the model computes: in our own exchanges, or over NCCL")
    no_exchange: bool = setting(False, "with --strategy none: yes, train N separate models")
    model: str = setting(None, "shape by name (baby, or what --init holds)", type=str, choices=PRESETS)
    n_layer: int = setting(None, "layers, instead of the preset's", type=int)
    n_head: int = setting(None, "attention heads, instead of the preset's", type=int)
    n_embd: int = setting(None, "channels, instead of the preset's", type=int)
    context: int = setting(None, "positions the model has, instead of the preset's", type=int)
    vocab_size: int = setting(None, "tokens the model knows, instead of the preset's or the tokenizer's", type=int)
    init: str = setting("random", "random, an llm.c .bin, a Hugging Face folder, or a run folder (its last checkpoint)")
    train_data: str = setting(None, "llm.c token shards, a glob in quotes", type=str)
    val_data: str = setting(None, "llm.c token shards for validation, a glob in quotes", type=str)
    text: str = setting(None, "a text file, or a folder of *.txt: 90%% to train on, 10%% for validation", type=str)
    tokenizer: str = setting(None, "for --text: gpt2 or bytes (the default)", type=str, choices=TOKENIZERS)
    batch_size: int = setting(4, "B: sequences a rank takes at once")
    seq_len: int = setting(None, "T: tokens of a sequence (the model's context)", type=int)
    grad_accum: int = setting(1, "K: micro-steps whose gradients are summed before each exchange")
    steps: int = setting(200, "how many steps")
    seed: int = setting(1337, "of the initialization and of the shuffling")
    shuffle: bool = setting(True, "read the windows in a random order; llm.c's order is --no-shuffle")
    lr: float = setting(1e-3, "highest learning rate")
    warmup: int = setting(20, "steps up to it")
    schedule: str = setting("cosine", "after the warm-up", choices=SCHEDULES)
    min_lr: float = setting(None, "where the schedule ends (a tenth of --lr)", type=float)
    weight_decay: float = setting(0.1, "AdamW's, on matrices and embeddings")
    beta1: float = setting(0.9, "AdamW's first moment")
    beta2: float = setting(0.95, "AdamW's second moment")
    eps: float = setting(1e-8, "AdamW's epsilon")
    grad_clip: float = setting(1.0, "highest global norm of the gradients, 0 for any")
    skip_outliers: float = setting(0.0, "standard deviations: skip a step whose norm is so far up, 0 for none")
    backend: str = setting("auto", "kernels; auto takes what the machine has", choices=(AUTO, "numpy", "cupy"))
    dtype: str = setting("float32", "of a model on a GPU; sums and AdamW stay float32", choices=DTYPES)
    tf32: bool = setting(False, "with --dtype float32 on a GPU: products on tensor cores, with 10 bits of mantissa")
    stochastic_rounding: bool = setting(
        False, "with --dtype bfloat16: parameters are rounded at random, exact on average"
    )
    transport: str = setting("auto", "between GPUs: what carries the exchange", choices=(AUTO, *TRANSPORTS))
    share_gpus: bool = setting(False, "yes, several ranks on one GPU: to try things out")
    threads: int = setting(0, "per rank; 0: the rank's share of its node's cores")
    eval_every: int = setting(50, "steps between validations, 0 for none; the last step is always validated")
    eval_steps: int = setting(20, "batches per rank in a validation, 0 for the whole validation set")
    sample_every: int = setting(0, "steps between samples of text that rank 0 draws and prints, 0 for none")
    checkpoint_every: int = setting(0, "steps between checkpoints, 0 for one at the end")
    keep: int = setting(2, "newest checkpoints that stay")
    check_replicas: int = setting(0, "steps between checks that all ranks hold the same parameters, 0 for none")
    resume: bool = setting(False, "go on from the newest checkpoint of --out; where there is none, begin")
    trace: str = setting("on", "steps to trace: on, off or FROM:TO")
    out: str = setting(None, "the run folder (runs/TIME-STRATEGY)", type=str)
    peak_tflops: float = setting(None, "of a rank, what MFU is of (a GPU's datasheet, cores measured)", type=positive)
    tensorboard: bool = setting(False, "also write the log for TensorBoard, to tensorboard/ in the run folder")
    stall_after: float = setting(60.0, "seconds: name a rank that others have waited for so long, 0 for never")
    end_on_stall: bool = setting(False, "and end the job then")
    expect_ranks: int = setting(None, "end with an error unless the world has this many ranks", type=int)


class OneLineParser(argparse.ArgumentParser):
    """argparse, but under mpirun a mistake is reported once for all ranks, in one line."""

    def error(self, message):
        end_with_one_line(start_mpi(), f"{message} (see {self.prog} --help)")


def parse_settings(description: str, arguments=None) -> Settings:
    parser = OneLineParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for item in fields(Settings):
        options = dict(item.metadata)
        default = None if item.default is MISSING else item.default
        if item.type is bool or isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction if default else "store_true"
        else:
            options.setdefault("type", type(default))
            options["metavar"] = item.name.rsplit("_", 1)[-1].upper() if "choices" not in options else None
        if default not in (None, False):
            options["help"] += f" ({default})"
        parser.add_argument("--" + item.name.replace("_", "-"), default=default, **options)
    given = parser.parse_args(arguments)
    if given.preset:
        parser.set_defaults(**presets.defaults_of(given.preset))
        given = parser.parse_args(arguments)
    return Settings(**vars(given))


def complete(settings: Settings, ranks: int) -> tuple[Settings, GPT2Config]:
    """The settings with every None decided, and the model's shape. UserError for whatever does not fit together."""
    if settings.strategy != AUTO:
        check_strategy(settings.strategy, settings.server, ranks, settings.no_exchange)
        check_exchange(settings.strategy, settings.wire, settings.error_feedback, settings.overlap)
    elif settings.server == "dedicated" or settings.no_exchange:
        raise UserError("--server dedicated or --no-exchange with --strategy auto: name the strategy they belong to")
    check_wire(settings.wire, settings.error_feedback)
    check_arrays(settings)
    if settings.preset:
        presets.check_data(settings)
    if settings.text and settings.train_data:
        raise UserError("--text and --train-data were both given: use one of them")
    if settings.val_data and not settings.train_data:
        raise UserError(
            "--val-data without --train-data: the text's own last tenth is its validation set; give both or none"
        )
    if settings.tokenizer and settings.train_data:
        raise UserError("--tokenizer with --train-data, which is tokenized already: leave --tokenizer out")
    check_checkpoints(settings)
    if settings.tensorboard:
        check_tensorboard("--tensorboard")
    config = model_config(settings)
    settings = replace(
        settings,
        tokenizer=None if settings.train_data else settings.tokenizer or "bytes",
        seq_len=settings.seq_len or config.context,
        min_lr=settings.lr / 10 if settings.min_lr is None else settings.min_lr,
    )
    check_numbers(settings)
    check_trace(settings.trace)
    if settings.seq_len > config.context:
        raise UserError(
            f"--seq-len is {settings.seq_len}, expected at most the model's context, {config.context}: "
            "lower it, or raise --context"
        )
    if settings.preset:
        batch_size, grad_accum = presets.batches(settings, worker_count(settings.server, ranks))
        settings = replace(settings, batch_size=batch_size, grad_accum=grad_accum)
    return settings, config


def check_arrays(settings: Settings, why: str = "") -> None:
    """UserError where backend, dtype, transport and strategy do not go together. why: of a backend that auto took."""
    if settings.backend == "numpy" and settings.dtype != "float32":
        raise UserError(
            f"--dtype {settings.dtype} with --backend numpy{why}, which computes in float32: use --backend cupy, or "
            "leave it out"
        )
    if settings.tf32 and settings.backend == "numpy":
        raise UserError(
            f"--tf32 with --backend numpy{why}, whose products are float32: use --backend cupy, or leave it out"
        )
    if settings.tf32 and settings.dtype != "float32":
        raise UserError(f"--tf32 with --dtype {settings.dtype}, whose products are of that: leave one of them out")
    if settings.stochastic_rounding:
        if settings.dtype != "bfloat16":
            raise UserError(
                f"--stochastic-rounding with --dtype {settings.dtype}, whose parameters are not rounded: add --dtype "
                "bfloat16, or leave it out"
            )
        check_rounding(settings.strategy, settings.wire)
    if settings.overlap and settings.backend == "numpy" and settings.strategy in OVERLAP_NEEDS_NCCL:
        raise no_overlap(settings.strategy, f"with --backend numpy{why}")
    if settings.strategy != AUTO:
        check_transport(settings.strategy, settings.transport, settings.wire, settings.overlap)
    if settings.transport not in DEVICE_TRANSPORTS:
        return
    if settings.backend == "numpy":
        raise UserError(
            f"--transport {settings.transport} with --backend numpy{why}, whose arrays are in host memory: use "
            "--backend cupy, or leave it out"
        )


def model_config(settings: Settings) -> GPT2Config:
    """From --init's file or --model's preset, with single numbers replaced by their flags."""
    if settings.init != "random":
        config = weights.read_config(settings.init)
    else:
        config = PRESETS[settings.model or "baby"]
        tokens = GPT2_VOCABULARY if settings.train_data or settings.tokenizer == "gpt2" else 256
        config = replace(config, vocab_size=max(config.vocab_size, tokens))
    given = {name: getattr(settings, name) for name in asdict(config) if getattr(settings, name) is not None}
    return replace(config, **given)


def check_checkpoints(settings: Settings) -> None:
    if settings.resume and not settings.out:
        raise UserError("--resume without --out, expected the folder of the run to go on with: add --out RUN")
    for flag in ("resume", "checkpoint_every", "check_replicas"):
        if settings.strategy == "none" and getattr(settings, flag):
            raise UserError(
                f"--{flag.replace('_', '-')} with --strategy none, whose ranks train models of their own: leave it out"
            )


def check_trace(steps: str) -> None:
    try:
        parse_steps(steps)
    except RunError as error:
        raise UserError(str(error)) from None


def check_numbers(settings: Settings) -> None:
    """Each number within what it can mean."""
    lowest = {
        "batch_size": 1, "seq_len": 1, "grad_accum": 1, "steps": 1, "seed": 0, "lr": 0, "warmup": 0, "min_lr": 0,
        "weight_decay": 0, "eps": 0, "grad_clip": 0, "threads": 0, "eval_every": 0, "eval_steps": 0,
        "stall_after": 0, "checkpoint_every": 0, "keep": 1, "check_replicas": 0,
        "skip_outliers": 0, "sample_every": 0,
    }  # fmt: skip
    for name, low in lowest.items():
        value = getattr(settings, name)
        if value is not None and not low <= value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} is {value}, expected a number of at least {low}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(settings, name) < 1:
            raise UserError(f"--{name} is {getattr(settings, name)}, expected at least 0 and below 1")
