"""Choose the length of a model's sequences. Positions that were never trained have random embeddings."""

from pathlib import Path

from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.formats import weights


def choose_sequence_length(requested: int | None, path: Path, config: GPT2Config) -> tuple[int, str]:
    """Return the length of sequences for the model at `path`, and a remark about this length or "".

    requested: --seq-len; None for the length of the training sequences, or for the context if that is unknown. Raise
    UserError if the length exceeds the context.
    """
    trained_length, _ = weights.trained_lengths(path) or (config.context, 0)
    length = requested or trained_length
    if length > config.context:
        raise UserError(f"--seq-len is {length}, expected at most the model's context, {config.context}: lower it")
    if not requested and length < config.context:
        return length, f"sequences of {length} tokens, as in the run's training (--seq-len; context {config.context})"
    untrained = untrained_positions(path, length)
    return length, untrained and f"warning: {untrained}"


def untrained_positions(path: Path, length: int) -> str:
    """Return a sentence about untrained positions among the first `length`; "" if there are none."""
    _, trained = weights.trained_lengths(path) or (0, length)
    if trained >= length:
        return ""
    return f"{path}: positions {trained} to {length - 1} are untrained: use sequences of at most {trained} tokens"


def trained_positions(init: str, config: GPT2Config, seq_len: int, before: dict) -> int:
    """Return how many positions are trained in a run with sequences of seq_len tokens.

    init: the origin of the model, "random" or a path. before: the facts of the checkpoint that the run resumes from, {}
    without one.
    """
    if "trained_positions" in before:
        return max(seq_len, before["trained_positions"])
    if init == "random":
        return seq_len
    _, trained = weights.trained_lengths(Path(init)) or (0, config.context)
    return max(seq_len, trained)
