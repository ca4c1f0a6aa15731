"""All settings of a training run. The fields of Settings make the flags, the printed table and config.json."""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path

from dist.wire import OPERATIONS, WIRE_BYTES
from dist.world import end_with_one_line, start_mpi
from gpt2.config import PRESETS, preset_name
from gpt2.data.documents import SPLIT_HELP
from gpt2.data.tokenizers import TOKENIZERS
from gpt2.optimizer import SCHEDULES as LEARNING_RATES
from gpt2.pipeline import SCHEDULES
from scripts.settings import presets
from scripts.settings.command_line import Parser
from scripts.settings.units import count_of
from strategies import AUTO, OWN_FILE, SERVERS, STRATEGIES
from strategies.compatibility import TRANSPORTS
from traces.read.schemas import STRATEGY

STRATEGY_NAMES = ",".join((*STRATEGIES, AUTO))
STRATEGY_HELP = (
    "how ranks exchange gradients; auto takes the fastest here; FILE.py is your own strategy, and auto:FILE.py "
    "tries it together with the others"
)
LEAST = 1e-9  # the lowest rate; no computer is slower
DTYPES = ("float32", "bfloat16")
SPLITS = (AUTO, "on", "off")
REPLICAS = ("node", "rank")
# The titles of the groups in --help, by the first field of each group.
GROUPS = {
    "preset": "known runs",
    "strategy": "exchange",
    "low_rank": "strategies that send less",
    "tensor_parallel": "one model on several ranks",
    "model": "model",
    "train_data": "data",
    "steps": "length of the run",
    "grad_accum": "optimization",
    "backend": "hardware",
    "eval_every": "validation and samples",
    "out": "run folder",
    "trace": "tracing",
    "stall_after": "faults",
}


def setting(default, text, metavar=None, **options):
    """Return a field of Settings. metavar: name of the value in --help. options: for add_argument."""
    return field(default=default, metadata={"help": text, "metavar": metavar, **options})


def positive(text: str) -> float:
    """Parse a number above 0, from LEAST to 1 / LEAST."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST <= value <= 1 / LEAST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0 (from {LEAST:g} to {1 / LEAST:g})")
    return value


def strategy_name(text: str) -> str:
    """Parse a strategy's name, auto, a Python file, or auto:FILE,FILE. Paths become full paths."""
    choice, colon, files = text.partition(":")
    if choice == AUTO and files:
        return choice + colon + ",".join(map(strategy_name, files.split(",")))
    if text not in (*STRATEGIES, AUTO) and not text.endswith(OWN_FILE):
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {STRATEGY_NAMES})")
    name = str(Path(text).resolve()) if text.endswith(OWN_FILE) else text
    if not STRATEGY.accepts(name):
        raise argparse.ArgumentTypeError(f"{text!r}, expected {STRATEGY.expected}: rename it")
    return name


def layer_counts(text: str) -> str:
    """Parse the number of layers of each stage, such as 4,4,4,0."""
    if not all(count.isdecimal() and len(count) < 6 for count in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of layers, expected numbers such as 4,4,4,0")
    return ",".join(str(int(count)) for count in text.split(","))


@dataclass(frozen=True)
class Settings:
    """The flags of scripts/train.py. None: other flags decide the value, as the help text says.

    typed: not a flag, but the names of flags on the command line. All others have default or preset values.
    """

    typed: frozenset[str] = frozenset()
    preset: str = setting(
        None, "take the settings of a known run (scripts/settings/presets.py)", choices=presets.KNOWN_RUNS
    )
    strategy: str = setting(AUTO, STRATEGY_HELP, type=strategy_name, metavar=f"{{{STRATEGY_NAMES}}}")
    server: str = setting(
        "colocated", "with reduce-bcast: rank 0 also computes gradients (colocated) or only serves", choices=SERVERS
    )
    wire: str = setting(
        "float32", "number format of messages; bfloat16 halves the bytes, int8 quarters them", choices=WIRE_BYTES
    )
    op: str = setting(
        None,
        "reduction operation of strategies that call MPI's collectives: MPI_SUM or our compiled one (mpi; own with "
        "--wire bfloat16)",
        choices=OPERATIONS,
    )
    error_feedback: bool = setting(
        None, "add each step's rounding errors on the wire to the next step's gradients (on with --wire int8)"
    )
    overlap: bool = setting(
        None,
        "exchange while the model computes; needs one of our own exchanges, or NCCL (on CPUs, --strategy auto decides; "
        "otherwise off)",
    )
    split_embedding: str = setting(
        AUTO, "with --overlap: exchange sparse embedding gradients separately from the head's", choices=SPLITS
    )
    low_rank: int = setting(4, "with powersgd: rank of the two factors that stand for a matrix", "R")
    local_steps: int = setting(50, "with diloco: steps that each replica makes between outer steps", "H")
    outer_lr: float = setting(0.7, "with diloco: learning rate of the outer Nesterov step", "RATE")
    outer_momentum: float = setting(0.9, "with diloco: momentum of the outer Nesterov step", "X")
    replica: str = setting("node", "with diloco: the ranks that train one replica", choices=REPLICAS)
    fragments: int = setting(
        1, "with diloco: parts that travel one after another during training, best as many as --local-steps", "P"
    )
    no_exchange: bool = setting(False, "confirm --strategy none: each rank trains a separate model")
    tensor_parallel: int = setting(1, "tensor-parallel shards: ranks that split the matrices of each layer")
    pipeline_parallel: int = setting(
        1, "pipeline stages: ranks that split the model by layers; --grad-accum microbatches fill them"
    )
    pipeline_schedule: str = setting(
        "1f1b", "order of forwards and backwards; gpipe holds all microbatches' activations", choices=SCHEDULES
    )
    pipeline_layers: str = setting(
        None, "layers of each stage: 4,4,4,0 (stages that take equal time, head included)", "LIST", type=layer_counts
    )
    model: str = setting(
        None,
        "shape of the model (baby, or the shape of --init); gpt2, gpt2-medium, gpt2-large and gpt2-xl are also known",
        type=preset_name, choices=PRESETS,
    )  # fmt: skip
    n_layer: int = setting(None, "layers (as in --model)")
    n_head: int = setting(None, "attention heads per layer (as in --model)")
    n_embd: int = setting(None, "channels (as in --model)")
    context: int = setting(None, "longest sequence in tokens (as in --model)")
    vocab_size: int = setting(None, "size of the vocabulary (as in --model or the tokenizer)")
    init: str = setting(
        "random",
        "initial parameters: random, an llm.c .bin, a Hugging Face folder, or a run folder (its last checkpoint)",
        "random|PATH",
    )
    train_data: str = setting(None, "training data: token shards in llm.c's format, a glob in quotes", "GLOB")
    val_data: str = setting(None, "validation data: token shards, a glob in quotes", "GLOB")
    text: str = setting(
        None,
        "a file or folder of text, read as by prepare.py; the last 10%% are for validation (without --train-data: the "
        "project's plays of Shakespeare)",
        "PATH",
    )
    split_documents: bool = setting(False, f"with --text: {SPLIT_HELP}")
    tokenizer: str = setting(
        None, "tokenizer of --text and of samples (as in --init; else as in --train-data, or bytes)", choices=TOKENIZERS
    )
    batch_size: int = setting(4, "sequences per rank and microbatch", "B")
    seq_len: int = setting(None, "tokens per sequence (as in --context)", "T")
    global_batch_size: int = setting(None, "sequences per step on all ranks; sets --grad-accum")
    shuffle: bool = setting(True, "shuffle the training data; --no-shuffle reads them in llm.c's order")
    steps: int = setting(200, "number of steps")
    tokens: int = setting(None, "training tokens, such as 300M; sets --steps and the schedule", "COUNT", type=count_of)
    minutes: float = setting(0.0, "write a checkpoint and end after this many minutes; 0: end after --steps", "MINUTES")
    grad_accum: int = setting(1, "microbatches per step; their gradients are summed before the exchange", "K")
    seed: int = setting(1337, "random seed of parameters, shuffling, rounding and samples", "SEED")
    lr: float = setting(1e-3, "peak learning rate", "RATE")
    warmup: int = setting(20, "warm-up steps, in which the learning rate rises to --lr", "STEPS")
    schedule: str = setting("cosine", "learning-rate schedule after the warm-up", choices=LEARNING_RATES)
    min_lr: float = setting(None, "learning rate at the end of the schedule (a tenth of --lr)", "RATE")
    lr_steps: int = setting(None, "step at which the schedule ends (as in --steps)", "STEPS")
    weight_decay: float = setting(0.1, "weight decay of AdamW, on matrices and embeddings", "X")
    beta1: float = setting(0.9, "decay rate of AdamW's first moment", "RATE")
    beta2: float = setting(0.95, "decay rate of AdamW's second moment", "RATE")
    eps: float = setting(1e-8, "epsilon of AdamW", "X")
    grad_clip: float = setting(1.0, "clip gradients to this global norm; 0: never", "NORM")
    skip_outliers: float = setting(
        0.0, "skip updates whose gradient norm is this many standard deviations above recent ones; 0: never", "Z"
    )
    backend: str = setting(
        "auto", "compute kernels; auto: cupy if every rank has a GPU", choices=(AUTO, "numpy", "cupy")
    )
    dtype: str = setting(
        "float32", "number format of matrix operands, on GPUs also of parameters; sums and AdamW stay float32",
        choices=DTYPES,
    )  # fmt: skip
    tf32: bool = setting(False, "with --dtype float32 on a GPU: multiply on tensor cores, with 10 bits of mantissa")
    stochastic_rounding: bool = setting(
        False, "with --dtype bfloat16 on a GPU: round parameters up or down at random, without bias"
    )
    transport: str = setting("auto", "transport of the exchange between GPUs", choices=(AUTO, *TRANSPORTS))
    share_gpus: bool = setting(False, "let several ranks share a GPU, for tests")
    threads: int = setting(0, "threads per rank; 0: its share of the node's cores")
    peak_tflops: float = setting(
        None, "peak of one rank that counts as 100%% MFU (GPUs: datasheet; CPUs: measured)", "TFLOPS", type=positive
    )
    eval_every: int = setting(50, "steps between validations, one of which follows the last step; 0: never", "STEPS")
    eval_steps: int = setting(20, "batches per rank in a validation; 0: the whole validation set")
    sample_every: int = setting(0, "steps between text samples; 0: none", "STEPS")
    out: str = setting(None, "run folder (runs/TIME-STRATEGY, or runs/TIME-auto-STRATEGY)", "DIR")
    checkpoint_every: int = setting(
        0, "steps between checkpoints, one of which follows the last step; 0: only that one", "STEPS"
    )
    checkpoint_minutes: float = setting(
        0.0, "minutes between checkpoints, in addition to --checkpoint-every; 0: none", "MINUTES"
    )
    keep: int = setting(2, "keep this many of the newest checkpoints")
    keep_every: int = setting(0, "also keep checkpoints whose step is a multiple of this number; 0: none", "STEPS")
    check_replicas: int = setting(0, "steps between checks that all replicas are equal; 0: none", "STEPS")
    resume: bool = setting(False, "continue from the newest checkpoint in --out, or begin if there is none")
    take_over: bool = setting(False, "take --out from another job, which then ends if it still runs")
    log_every: int = setting(None, "steps between progress lines (at most one line per second)", "STEPS")
    trace: str = setting(
        "on", "steps to trace: on (the first 256, then fewer, and slow ones), off, or all of FROM:TO", "on|off|FROM:TO"
    )
    trace_mb: int = setting(64, "size limit of a rank's traces, in MB", "MB")
    stall_after: float = setting(60.0, "name a rank that others have waited for during this time; 0: never", "SECONDS")
    end_on_stall: bool = setting(False, "end the job when --stall-after names a rank")
    restarts: int = setting(
        0, "start the ranks with --launcher, and restart them up to this many times if they fail; 0: do not"
    )
    launcher: str = setting(
        None, "with --restarts: the command that starts the ranks, such as 'mpirun -n 4'", "COMMAND"
    )
    restart_after: float = setting(
        3600.0, "with --restarts: end ranks that write nothing to the run folder for this time; 0: never", "SECONDS"
    )
    supervisor: str = setting(
        None, "set by --restarts for its ranks: its number, so that a restart may take over the run folder", "N"
    )
    expect_ranks: int = setting(None, "fail unless there are exactly this many ranks")


class OneLineParser(Parser):
    """The parser of a program under MPI. It reports a mistake in one line for all ranks, not one per rank."""

    def end(self, text: str):
        end_with_one_line(start_mpi(), text)


def flags() -> list:
    """Return the fields of Settings that are flags."""
    return [item for item in fields(Settings) if "help" in item.metadata]


def parse_settings(description: str, arguments=None) -> Settings:
    """Parse a command line. A preset changes the defaults, so flags override it."""
    parser = OneLineParser(description, usage="%(prog)s [FLAG ...]")
    for item in flags():
        if item.name in GROUPS:
            group = parser.add_argument_group(GROUPS[item.name])
        options = dict(item.metadata)
        metavar = options.pop("metavar") or ("N" if item.type is int else None)
        default = item.default
        if item.type is bool:
            options["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
        else:
            options = {"type": item.type, "metavar": metavar} | options
        if default not in (None, False):
            options["help"] += f" ({default})"
        group.add_argument("--" + item.name.replace("_", "-"), default=argparse.SUPPRESS, **options)
    given = vars(parser.parse_args(arguments))
    preset = {}
    if "preset" in given:  # presets.batches decides the values that are None
        preset = presets.KNOWN_RUNS[given["preset"]].settings | {"batch_size": None, "grad_accum": None}
    return Settings(**(preset | given), typed=frozenset(given))
