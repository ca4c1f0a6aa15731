"""Every setting of a training run, written once: the fields below make the flags, the printed table and config.json."""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path

from dist.wire import OPERATIONS, WIRE_BYTES
from dist.world import end_with_one_line, start_mpi
from gpt2.config import PRESETS, preset_name
from gpt2.data.end_of_text import SPLIT_HELP
from gpt2.data.tokenizers import TOKENIZERS
from gpt2.optimizer import SCHEDULES as LEARNING_RATES
from gpt2.pipeline import SCHEDULES
from scripts.settings import presets
from scripts.settings.command_line import Parser
from scripts.settings.units import count_of
from strategies import AUTO, OWN_FILE, SERVERS, STRATEGIES
from strategies.checks import TRANSPORTS
from traces.read.checks import STRATEGY

STRATEGY_NAMES = ",".join((*STRATEGIES, AUTO))
STRATEGY_HELP = (
    "how gradients are exchanged; auto takes what is fastest here; or a Python file with a strategy of your own, "
    "auto:FILE to try it too"
)
LEAST = 1e-9  # of rates: nothing that computes is slower
DTYPES = ("float32", "bfloat16")
SPLITS = (AUTO, "on", "off")
# The groups of --help: the title of each, by the field of Settings that is its first.
GROUPS = {
    "preset": "known runs",
    "strategy": "exchange",
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


def setting(default, text, **options):
    """A field of Settings, with what its flag needs: the help text, and options of argparse's add_argument."""
    return field(default=default, metadata={"help": text, **options})


def positive(text: str) -> float:
    """The value of a flag that is a number above 0, neither vanishingly small nor immense."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST <= value <= 1 / LEAST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0 (from {LEAST:g} to {1 / LEAST:g})")
    return value


def strategy_name(text: str) -> str:
    """A strategy's name, auto, or the full path of a Python file that holds one; or auto:FILE,FILE with full paths."""
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
    """Layers of each stage, numbers with commas between them."""
    if not all(count.isdecimal() and len(count) < 6 for count in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no list of layers, expected numbers such as 4,4,4,0")
    return ",".join(str(int(count)) for count in text.split(","))


@dataclass(frozen=True)
class Settings:
    """The flags of scripts/train.py. None means: the other flags decide it, as the help text says.

    typed: no flag, but the names of those that the command line has; all others are defaults, or a preset's.
    """

    typed: frozenset[str] = frozenset()
    preset: str = setting(
        None, "take the settings of a known run (scripts/settings/presets.py)", choices=presets.KNOWN_RUNS
    )
    strategy: str = setting(AUTO, STRATEGY_HELP, type=strategy_name, metavar=f"{{{STRATEGY_NAMES}}}")
    server: str = setting(
        "colocated", "with reduce-bcast: rank 0 computes gradients too, or only serves", choices=SERVERS
    )
    wire: str = setting("float32", "number format in which ranks send; bfloat16 halves the bytes", choices=WIRE_BYTES)
    op: str = setting(
        None,
        "what MPI's collectives add with, where a strategy calls them: MPI's sum, or a compiled operation of our own "
        "(mpi; own with --wire bfloat16)",
        choices=OPERATIONS,
    )
    error_feedback: bool = setting(
        False, "with --wire bfloat16: add what rounding has lost to the gradients of the next step"
    )
    overlap: bool = setting(
        None,
        "exchange while the model computes; needs one of our own exchanges, or NCCL (auto, on cores: as is faster; "
        "else off)",
    )
    split_embedding: str = setting(
        AUTO, "with --overlap: exchange the embedding's looked-up rows apart from its use as head", choices=SPLITS
    )
    no_exchange: bool = setting(False, "confirm --strategy none: each rank trains a model of its own")
    tensor_parallel: int = setting(1, "parts: ranks that share each layer's matrices, and sum what these make")
    pipeline_parallel: int = setting(
        1, "stages: ranks that share a model layer by layer; --grad-accum micro-steps fill them"
    )
    pipeline_schedule: str = setting(
        "1f1b", "order of a stage's forwards and backwards; gpipe holds the activations of all", choices=SCHEDULES
    )
    pipeline_layers: str = setting(
        None, "layers of each stage, such as 4,4,4,0 (equally long stages, with the head's share)", type=layer_counts
    )
    model: str = setting(
        None,
        "the model's shape by name (baby, or the shape of --init); gpt2, gpt2-medium, gpt2-large and gpt2-xl are the "
        "shapes of these names elsewhere",
        type=preset_name, choices=PRESETS,
    )  # fmt: skip
    n_layer: int = setting(None, "layers of the model, if not as in --model")
    n_head: int = setting(None, "attention heads of a layer, if not as in --model")
    n_embd: int = setting(None, "channels of the model, if not as in --model")
    context: int = setting(None, "longest sequence that the model can read, if not as in --model")
    vocab_size: int = setting(None, "tokens that the model knows, if not as in --model or the tokenizer")
    init: str = setting(
        "random",
        "first parameters: random, or from an llm.c .bin, a Hugging Face folder, or a run folder's last checkpoint",
    )
    train_data: str = setting(None, "token shards in llm.c's format to train on, a glob in quotes")
    val_data: str = setting(None, "token shards for validation, a glob in quotes")
    text: str = setting(
        None,
        "a file or a folder of text, as prepare.py reads it; 90%% of the text is for training, 10%% for validation "
        "(without --train-data: plays of Shakespeare that come with this project)",
    )
    split_documents: bool = setting(False, f"with --text: {SPLIT_HELP}")
    tokenizer: str = setting(
        None,
        "how a text becomes tokens, also in samples (that of --init's model; else that of --train-data, or bytes)",
        choices=TOKENIZERS,
    )
    batch_size: int = setting(4, "B: sequences that a rank computes at once")
    seq_len: int = setting(None, "T: tokens of a sequence (as many as --context)")
    global_batch_size: int = setting(
        None, "sequences of a step on all ranks together; --grad-accum then follows from it and --batch-size"
    )
    shuffle: bool = setting(True, "read the training data in a random order; --no-shuffle is the order of llm.c")
    steps: int = setting(200, "steps to train")
    tokens: int = setting(
        None, "tokens to train on, such as 300M: --steps and the schedule then follow from it", type=count_of
    )
    minutes: float = setting(
        0.0, "end after so many minutes with a checkpoint, wherever the run stands; 0: after --steps"
    )
    grad_accum: int = setting(1, "K: micro-steps of a step; their gradients are summed before the exchange")
    seed: int = setting(1337, "seed of everything random: parameters, shuffling, rounding, samples")
    lr: float = setting(1e-3, "highest learning rate, reached after the warm-up")
    warmup: int = setting(20, "steps over which the learning rate rises to --lr")
    schedule: str = setting("cosine", "how the learning rate goes on after the warm-up", choices=LEARNING_RATES)
    min_lr: float = setting(None, "learning rate at the end of the schedule (a tenth of --lr)")
    lr_steps: int = setting(None, "step at which the schedule ends, wherever the run stops (as many as --steps)")
    weight_decay: float = setting(0.1, "weight decay of AdamW, on matrices and embeddings")
    beta1: float = setting(0.9, "decay rate of AdamW's first moment")
    beta2: float = setting(0.95, "decay rate of AdamW's second moment")
    eps: float = setting(1e-8, "epsilon of AdamW")
    grad_clip: float = setting(1.0, "scale gradients down to this global norm; 0: never")
    skip_outliers: float = setting(
        0.0, "skip a step if its gradient norm is this many standard deviations above the last ones; 0: never"
    )
    backend: str = setting(
        "auto", "which kernels compute; auto: cupy if every rank has a GPU", choices=(AUTO, "numpy", "cupy")
    )
    dtype: str = setting(
        "float32", "number format of products' operands, and on a GPU of the model; sums and AdamW stay float32",
        choices=DTYPES,
    )  # fmt: skip
    tf32: bool = setting(False, "with --dtype float32 on a GPU: multiply on tensor cores, with 10 bits of mantissa")
    stochastic_rounding: bool = setting(
        False, "with --dtype bfloat16: round parameters at random, so that they are right on average"
    )
    transport: str = setting("auto", "what carries the exchange between GPUs", choices=(AUTO, *TRANSPORTS))
    share_gpus: bool = setting(False, "allow several ranks on one GPU, to try things out")
    threads: int = setting(0, "threads of a rank; 0: as many as its share of the node's cores")
    peak_tflops: float = setting(
        None,
        "the most that one rank can compute, 100%% in MFU (a GPU's datasheet; cores are measured)",
        type=positive,
    )
    eval_every: int = setting(50, "steps between validations; there is one after the last step too; 0: never")
    eval_steps: int = setting(20, "batches that each rank takes in a validation; 0: the whole validation set")
    sample_every: int = setting(0, "steps between two samples of text, which rank 0 prints; 0: none")
    out: str = setting(None, "folder of the run (runs/TIME-STRATEGY, or TIME-auto-STRATEGY)")
    checkpoint_every: int = setting(
        0, "steps between checkpoints; there is one after the last step too; 0: that one alone"
    )
    checkpoint_minutes: float = setting(
        0.0, "minutes between checkpoints, beside --checkpoint-every; 0: by steps alone"
    )
    keep: int = setting(2, "how many checkpoints stay, the newest ones")
    keep_every: int = setting(0, "checkpoints of steps that are multiples of this one stay, too; 0: none")
    check_replicas: int = setting(0, "steps between checks that all ranks hold the same parameters; 0: none")
    resume: bool = setting(False, "go on from the newest checkpoint in --out; if there is none, begin")
    take_over: bool = setting(
        False, "train in --out although another job seems to hold it; that one ends, if it still runs"
    )
    log_every: int = setting(None, "steps between two progress lines (as many as give a line a second at most)")
    tensorboard: bool = setting(False, "write the log for TensorBoard too, into tensorboard/ of the run folder")
    trace: str = setting(
        "on", "which steps to trace: on (the first 256, then ever fewer, and slow ones), off (none) or FROM:TO (all)"
    )
    trace_mb: int = setting(64, "the most that each rank's traces take, in MB")
    stall_after: float = setting(60.0, "name a rank that others have waited for so many seconds; 0: never")
    end_on_stall: bool = setting(False, "end the job when --stall-after names a rank")
    restarts: int = setting(
        0, "start the ranks by --launcher, and so often again when they have failed; 0: this is a rank itself"
    )
    launcher: str = setting(None, "with --restarts: what starts the ranks, such as 'mpirun -n 4'")
    restart_after: float = setting(
        3600.0, "with --restarts: end a start that writes nothing to its run folder for so many seconds; 0: never"
    )
    supervisor: str = setting(None, "of --restarts to its ranks: its number; a start takes over from those before it")
    expect_ranks: int = setting(None, "end with an error unless there are this many ranks")


class OneLineParser(Parser):
    """Of a program that runs under MPI: a mistake is one line for all ranks, not one on each of them."""

    def end(self, text: str):
        end_with_one_line(start_mpi(), text)


def flags() -> list:
    """The fields of Settings that are flags."""
    return [item for item in fields(Settings) if "help" in item.metadata]


def parse_settings(description: str, arguments=None) -> Settings:
    """The settings of a command line. A preset changes the defaults, so flags beside --preset count for more."""
    parser = OneLineParser(description, usage="%(prog)s [FLAG ...]")
    for item in flags():
        if item.name in GROUPS:
            group = parser.add_argument_group(GROUPS[item.name])
        options, default = dict(item.metadata), item.default
        if item.type is bool:
            options["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
        else:
            options.setdefault("type", item.type)
            options.setdefault("metavar", None if "choices" in options else item.name.rsplit("_", 1)[-1].upper())
        if default not in (None, False):
            options["help"] += f" ({default})"
        group.add_argument("--" + item.name.replace("_", "-"), default=argparse.SUPPRESS, **options)
    given = vars(parser.parse_args(arguments))
    preset = presets.defaults_of(given["preset"]) if "preset" in given else {}
    return Settings(**(preset | given), typed=frozenset(given))
