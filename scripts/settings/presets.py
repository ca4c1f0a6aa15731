"""Presets of known runs, for train.py --preset NAME.

    mpirun -n 2 python scripts/train.py --preset nanogpt-shakespeare --text tinyshakespeare.txt
    srun -n 8 python scripts/train.py --preset llmc-fineweb-124M --strategy hierarchical-sharded --dtype bfloat16 \\
        --train-data '...' --val-data '...'

A preset sets the tokens per step, not the number of ranks. The ranks share the step's sequences, and --grad-accum
follows from the number of ranks and --batch-size. A flag on the command line overrides the preset; --batch-size and
--grad-accum together set another global batch. The user chooses the data and the exchange.
"""

from dataclasses import dataclass

from gpt2.errors import UserError


@dataclass(frozen=True)
class Preset:
    """A known run. needs: {flag: description of its data}. batch_size: most sequences in a microbatch. settings: the
    defaults of other flags."""

    needs: dict[str, str]
    tokens_per_step: int
    batch_size: int
    settings: dict


KNOWN_RUNS = {
    # nanoGPT's README, "I only have a macbook", and the defaults that its command takes from
    # config/train_shakespeare_char.py and train.py. Published: validation loss 1.88. In nanoGPT the 65 characters
    # are the tokens, biases are left out, and --eval_iters=20 draws 20 batches; here the whole validation set is used.
    "nanogpt-shakespeare": Preset(
        needs={"text": "tinyshakespeare.txt"},
        tokens_per_step=12 * 64,  # --batch_size=12 --block_size=64
        batch_size=12,
        settings={
            "model": "baby",  # --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0
            "seq_len": 64,
            "steps": 2000,  # --max_iters=2000
            "lr": 1e-3,  # --min_lr=1e-4: a tenth, the default, so that it follows another --lr
            "schedule": "cosine",  # --lr_decay_iters=2000
            "warmup": 100,
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 0.1,
            "grad_clip": 1.0,
            "eval_every": 250,
            "eval_steps": 0,
        },
    ),
    # llm.c's scripts/run_gpt2_124M.sh; each comment names the script's flag. Lines without comment are defaults of
    # train_gpt2.cu. On GPUs the user adds --dtype bfloat16. ZeRO-1 (-z 1) is our default strategy.
    "llmc-fineweb-124M": Preset(
        needs={"train_data": "FineWeb's fineweb_train_*.bin", "val_data": "FineWeb's fineweb_val_*.bin"},
        tokens_per_step=524_288,  # -d
        batch_size=64,  # -b
        settings={
            "model": "gpt2-124M",  # -e d12
            "seq_len": 1024,  # -t
            "steps": 18_865,  # one epoch
            "lr": 6e-4,  # -l
            "schedule": "cosine",
            "min_lr": 0.0,  # -q, as a fraction of the peak
            "warmup": 700,  # -u
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,  # -c
            "grad_clip": 1.0,
            "eval_every": 250,  # -v
            "eval_steps": 20,
            "sample_every": 20_000,  # -s
            "checkpoint_every": 5000,  # -n
        },
    ),
}


def check_data(settings) -> None:
    """Raise UserError unless the flags for the preset's data are given."""
    for name, what in KNOWN_RUNS[settings.preset].needs.items():
        if not getattr(settings, name):
            flag = name.replace("_", "-")
            raise UserError(f"--preset {settings.preset} without --{flag}, expected {what}: add --{flag} PATH")


def batches(settings, workers: int) -> tuple[int, int]:
    """Return the (--batch-size, --grad-accum) with which `workers` compute the preset's tokens per step.

    If only one of the flags was given, the other follows from it. Raise UserError if the tokens do not divide.
    """
    batch_size = settings.batch_size
    micro_steps = settings.grad_accum
    preset = KNOWN_RUNS[settings.preset]
    if batch_size and micro_steps:
        return batch_size, micro_steps
    takes = f"--preset {settings.preset} takes {preset.tokens_per_step} tokens a step"
    sequences, rest = divmod(preset.tokens_per_step, settings.seq_len)
    if rest:
        raise UserError(f"{takes}, not divisible into sequences of {settings.seq_len}: choose another --seq-len")
    if sequences % workers:
        raise UserError(
            f"{takes}, {sequences} sequences, not divisible among {workers} computing ranks: start a number that "
            f"divides {sequences}, or give --batch-size and --grad-accum"
        )
    share = sequences // workers
    given = batch_size or micro_steps
    if given and share % given:
        flag = "--batch-size" if batch_size else "--grad-accum"
        raise UserError(
            f"{takes}, {share} sequences for each rank, not divisible by {flag} {given}: choose another, or give "
            "--batch-size and --grad-accum"
        )
    if micro_steps:
        return share // micro_steps, micro_steps
    if not batch_size:
        batch_size = max(size for size in range(1, min(share, preset.batch_size) + 1) if share % size == 0)
    return batch_size, share // batch_size
