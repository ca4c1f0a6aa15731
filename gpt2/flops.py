"""How many floating point operations the model itself asks for, whatever a program makes of them: MFU's numerator."""

from gpt2.config import GPT2Config


def flops_per_token(config: GPT2Config, sequence_length: int, parameters: int) -> int:
    """Forward and backward of one token by llm.c's count (mfu.h): 6 N for the parameters, the padded vocabulary's
    included, and 6 L C T for causal attention."""
    return 6 * parameters + 6 * config.n_layer * config.n_embd * sequence_length
