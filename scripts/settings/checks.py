"""Complete the settings: decide values that the flags leave open, and refuse flags that do not fit together."""

from dataclasses import asdict, replace

from gpt2.config import GPT2_VOCABULARY, PRESETS, GPT2Config
from gpt2.errors import UserError
from gpt2.formats import weights
from scripts.settings import presets
from scripts.settings.derived import workers
from scripts.settings.model_parallel import with_layers
from scripts.settings.split_embedding import check_split
from scripts.settings.tokenizer import start_of, tokenizer_of, tokenizer_of_training
from scripts.settings.training import Settings
from strategies import find, is_auto
from strategies.compatibility import (
    DEVICE_TRANSPORTS,
    check_exchange,
    check_own_flags,
    check_rounding,
    check_server,
    check_transport,
    check_wire,
    no_overlap,
    overlaps_over_nccl,
)
from traces import RunError
from traces.record.steps import parse_steps

MOST_THREADS = 4096  # of a rank
MOST_LAYERS = 10_000  # ten times as many as in the deepest model ever trained
MOST = 2**31 - 1  # of any other count: file headers store 32 bits
MOST_TOKENS = 10**18  # more is a typing error
FLOAT32 = 1.2e-38, 3.4e38  # kernels compute in float32: smaller numbers would be 0, larger ones infinite


def complete(settings: Settings, ranks: int) -> tuple[Settings, GPT2Config]:
    """Decide every value that is None. Return the settings and the model's shape. Raise UserError if they do not fit.

    With --strategy auto, the strategy stays open; overlap also does, unless its flag is given.
    """
    check_exchange_flags(settings, ranks)
    check_arrays(settings)
    check_data_flags(settings)
    check_checkpoints(settings)
    check_numbers(settings)
    config = model_config(settings)
    settings = replace(
        settings,
        tokenizer=tokenizer_of_training(settings, config.vocab_size),
        seq_len=config.context if settings.seq_len is None else settings.seq_len,
        min_lr=settings.lr / 10 if settings.min_lr is None else settings.min_lr,
        overlap=settings.overlap if is_auto(settings.strategy) else bool(settings.overlap) or settings.fragments > 1,
        error_feedback=feeds_back(settings),
    )
    if settings.min_lr > settings.lr:
        raise UserError(
            f"--min-lr is {settings.min_lr:g}, expected at most --lr, {settings.lr:g}: lower it, or leave it out for a "
            "tenth of --lr"
        )
    if settings.seq_len > config.context:
        raise UserError(
            f"--seq-len is {settings.seq_len}, expected at most the model's context, {config.context}: "
            "lower it, or raise --context"
        )
    settings = with_layers(settings, config, ranks)
    check_split(settings, ranks)
    if settings.global_batch_size:
        settings = with_micro_steps(settings, workers(settings, ranks))
    if settings.preset:
        batch_size, grad_accum = presets.batches(settings, workers(settings, ranks))
        settings = replace(settings, batch_size=batch_size, grad_accum=grad_accum)
    if settings.tokens:
        settings = with_steps(settings, workers(settings, ranks))
    if settings.lr_steps is None:
        settings = replace(settings, lr_steps=settings.steps)
    check_trace(settings)
    return settings, config


def feeds_back(settings: Settings) -> bool:
    """Return whether rounding errors are fed back: without the flag, on an int8 wire if the strategy can."""
    if settings.error_feedback is not None:
        return settings.error_feedback
    can = is_auto(settings.strategy) or find(settings.strategy).traits.error_feedback
    return settings.wire == "int8" and can


def check_trace(settings: Settings) -> None:
    """Raise UserError unless --trace names steps of the run. (A resumed run may already be past these steps.)"""
    try:
        first, _ = parse_steps(settings.trace)
    except RunError as error:
        raise UserError(str(error)) from None
    if settings.trace != "off" and first > settings.steps:
        raise UserError(f"--trace {settings.trace} begins after the last step, {settings.steps}: choose earlier steps")


def with_steps(settings: Settings, workers: int) -> Settings:
    """Derive --steps from --tokens, rounded up. Return the settings. Raise UserError if --steps was also given."""
    if "steps" in settings.typed:
        raise UserError("--tokens with --steps, which also sets it: leave one of them out")
    of_step = settings.batch_size * settings.grad_accum * workers * settings.seq_len
    steps = -(-settings.tokens // of_step)
    if steps > MOST:
        raise UserError(f"--tokens {settings.tokens} is {steps} steps of {of_step} tokens, expected at most {MOST}")
    return replace(settings, steps=steps)


def with_micro_steps(settings: Settings, workers: int) -> Settings:
    """Derive --grad-accum from --global-batch-size. Return the settings. Raise UserError if that is impossible."""
    flag = f"--global-batch-size {settings.global_batch_size}"
    for other in ("grad_accum", "preset"):
        if other in settings.typed:
            raise UserError(f"{flag} with --{other.replace('_', '-')}, which also sets it: leave one of them out")
    at_once = settings.batch_size * workers
    micro_steps, rest = divmod(settings.global_batch_size, at_once)
    if rest:
        raise UserError(
            f"{flag}, expected a multiple of {at_once}, the sequences of --batch-size {settings.batch_size} on all "
            "ranks: change one of them"
        )
    return replace(settings, grad_accum=micro_steps)


def check_exchange_flags(settings: Settings, ranks: int) -> None:
    """Raise UserError if the strategy does not support the exchange's flags. With auto, check again later."""
    if not is_auto(settings.strategy):
        kind = find(settings.strategy)
        check_server(kind, settings.server, ranks, settings.no_exchange)
        check_own_flags(kind, settings.typed)
        check_exchange(kind, settings.wire, settings.error_feedback, settings.overlap, settings.op)
    elif settings.server == "dedicated" or settings.no_exchange:
        raise UserError("--server dedicated or --no-exchange with --strategy auto: name a strategy that supports them")
    else:
        check_own_flags(None, settings.typed)
    check_wire(settings.wire, settings.error_feedback, settings.op)


def check_arrays(settings: Settings, why: str = "") -> None:
    """Raise UserError if backend, dtype, transport and strategy do not fit together.

    why: the reason why --backend auto chose this backend, in brackets.
    """
    if settings.tf32 and settings.backend == "numpy":
        raise UserError(
            f"--tf32 with --backend numpy{why}, whose products are float32: use --backend cupy, or leave it out"
        )
    if settings.tf32 and settings.dtype != "float32":
        raise UserError(f"--tf32 with --dtype {settings.dtype}, whose products are not float32: leave one of them out")
    kind = None if is_auto(settings.strategy) else find(settings.strategy)
    if settings.stochastic_rounding:
        if settings.dtype != "bfloat16":
            raise UserError(
                f"--stochastic-rounding with --dtype {settings.dtype}, whose parameters are not rounded: add --dtype "
                "bfloat16, or leave it out"
            )
        if settings.backend == "numpy":
            raise UserError(
                f"--stochastic-rounding with --backend numpy{why}, whose parameters stay float32: use --backend cupy, "
                "or leave it out"
            )
        check_rounding(kind, settings.strategy, settings.wire)
    if kind and settings.overlap and settings.backend == "numpy" and overlaps_over_nccl(kind):
        raise no_overlap(kind, f"with --backend numpy{why}")
    if kind:
        check_transport(kind, settings.transport, settings.wire, settings.overlap, settings.op)
    if settings.transport in DEVICE_TRANSPORTS and settings.backend == "numpy":
        raise UserError(
            f"--transport {settings.transport} with --backend numpy{why}, whose arrays are in host memory: use "
            "--backend cupy, or leave it out"
        )


def check_data_flags(settings: Settings) -> None:
    if settings.preset:
        presets.check_data(settings)
    if settings.text and settings.train_data:
        raise UserError("--text and --train-data were both given: use one of them")
    if settings.split_documents and not settings.text:
        raise UserError(
            "--split-documents without --text, expected a text to split: leave it out, or give it to prepare.py where "
            "it makes --train-data"
        )
    if settings.val_data and not settings.train_data:
        raise UserError(
            "--val-data without --train-data: the text's own last tenth is its validation set; give both or none"
        )


def model_config(settings: Settings) -> GPT2Config:
    """Return the shape of --init's file, else that of --model, changed by --n-layer etc.

    Raise UserError if the flags contradict the file's shape.
    """
    given = {name: getattr(settings, name) for name in asdict(PRESETS["baby"]) if getattr(settings, name) is not None}
    if settings.init != "random":
        found = weights.read_config(settings.init)
        # --model names the smallest vocabulary: --tokenizer and --train-data may raise it.
        named = PRESETS[settings.model] if settings.model else found
        check_shape(settings, found, replace(named, vocab_size=max(named.vocab_size, found.vocab_size)), given)
        return found
    config = PRESETS[settings.model or "baby"]
    goes_on, run = start_of(settings)
    tokenizer = settings.tokenizer or (goes_on and tokenizer_of(run))
    tokens = GPT2_VOCABULARY if settings.train_data or tokenizer == "gpt2" else 256
    return replace(config, **{"vocab_size": max(config.vocab_size, tokens)} | given)


def check_shape(settings: Settings, found: GPT2Config, named: GPT2Config, given: dict[str, int]) -> None:
    """Raise UserError unless --init's model has the shape that --model and the flags give."""
    unlike = {name: value for name, value in (asdict(named) | given).items() if value != getattr(found, name)}
    if not unlike:
        return
    flags = [f"--{name.replace('_', '-')} {given[name]}" for name in unlike if name in given]
    if unlike.keys() - given.keys():
        flags.insert(0, f"--model {settings.model}" if "model" in settings.typed else f"--preset {settings.preset}")
    expected = ", ".join(f"{name} {value}" for name, value in unlike.items())
    has = ", ".join(f"{name} {getattr(found, name)}" for name in unlike)
    advice = "leave it out"
    if flags[0].startswith("--preset"):
        advice = "give the model's shape by --model, or by --n-layer and similar flags"
    raise UserError(f"{' '.join(flags)} with --init {settings.init}, expected {expected}, found {has}: {advice}")


def check_checkpoints(settings: Settings) -> None:
    if settings.resume and not settings.out:
        raise UserError("--resume without --out, expected the folder of the run to resume: add --out RUN")
    if settings.take_over and not settings.out:
        raise UserError("--take-over without --out, expected the folder of the run to take over: add --out RUN")
    for flag in ("resume", "checkpoint_every", "checkpoint_minutes", "check_replicas"):
        if getattr(settings, flag) and not is_auto(settings.strategy) and not find(settings.strategy).traits.exchanges:
            raise UserError(
                f"--{flag.replace('_', '-')} with --strategy {settings.strategy}, whose ranks train separate "
                "models: leave it out"
            )


def check_numbers(settings: Settings) -> None:
    """Raise UserError if a number is out of range."""
    lowest = {
        "batch_size": 1, "seq_len": 1, "grad_accum": 1, "steps": 1, "seed": 0, "lr": 0, "warmup": 0, "min_lr": 0,
        "lr_steps": 1, "weight_decay": 0, "eps": FLOAT32[0], "grad_clip": 0, "threads": 0, "eval_every": 0,
        "eval_steps": 0,
        "stall_after": 0, "global_batch_size": 1, "log_every": 1, "trace_mb": 1, "checkpoint_every": 0, "keep": 1,
        "keep_every": 0, "check_replicas": 0, "minutes": 0, "checkpoint_minutes": 0, "tokens": 1, "restarts": 0,
        "skip_outliers": 0, "sample_every": 0, "n_layer": 1, "n_head": 1, "n_embd": 1, "context": 1, "vocab_size": 1,
        "restart_after": 0, "tensor_parallel": 1, "pipeline_parallel": 1, "low_rank": 1, "local_steps": 1,
        "outer_lr": 0, "fragments": 1,
    }  # fmt: skip
    if settings.eps == 0:
        raise UserError(
            "--eps is 0, expected a number above 0: AdamW divides by it where a parameter has no gradient, such as an "
            "unused position or the vocabulary's padding"
        )
    highest = {"seed": 2**64 - 1, "tokens": MOST_TOKENS, "threads": MOST_THREADS, "n_layer": MOST_LAYERS}
    for name, low in lowest.items():
        value = getattr(settings, name)
        flag = name.replace("_", "-")
        if value is None:
            continue
        if not low <= value < float("inf"):
            raise UserError(f"--{flag} is {value}, expected a number of at least {low}")
        least, most = FLOAT32 if isinstance(value, float) else (low, highest.get(name, MOST))
        if value and not least <= value <= most:
            or_zero = ", or 0" if low == 0 else ""
            between = f"from {least:g} to {most:g}{or_zero}" if isinstance(value, float) else f"of at most {most}"
            raise UserError(f"--{flag} is {value}, expected a number {between}")
    for name in ("beta1", "beta2", "outer_momentum"):
        if not 0 <= getattr(settings, name) < 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(settings, name)}, expected at least 0 and below 1")
    if settings.local_steps % settings.fragments:
        raise UserError(
            f"--local-steps {settings.local_steps} with --fragments {settings.fragments}, expected a multiple of it: "
            "change one"
        )
