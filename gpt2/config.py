"""The shape of a GPT-2: five numbers, named presets, and the operations per token."""

from dataclasses import asdict, dataclass

from gpt2.errors import UserError


@dataclass(frozen=True)
class GPT2Config:
    """n_layer blocks of n_head heads (H) over n_embd channels (C), up to `context` positions, vocab_size tokens (V).

    UserError: a number below 1, or heads that do not divide the channels.
    """

    n_layer: int
    n_head: int
    n_embd: int
    context: int
    vocab_size: int

    def __post_init__(self):
        for name, value in asdict(self).items():
            if value < 1:
                raise UserError(
                    f"{name} is {value}, expected at least 1: give --{name.replace('_', '-')} a positive number"
                )
        if self.n_embd % self.n_head:
            raise UserError(
                f"{self.n_head} heads do not divide {self.n_embd} channels: choose --n-embd as a multiple of --n-head"
            )

    @property
    def padded_vocab_size(self) -> int:
        """V rounded up to a multiple of 128 (Vp), for faster matrix products. The pad takes no part in the loss."""
        return -(-self.vocab_size // 128) * 128

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head


GPT2_VOCABULARY = 50257

PRESETS = {
    "tiny": GPT2Config(n_layer=2, n_head=4, n_embd=64, context=64, vocab_size=256),
    "baby": GPT2Config(n_layer=4, n_head=4, n_embd=128, context=64, vocab_size=256),
    "gpt2-124M": GPT2Config(n_layer=12, n_head=12, n_embd=768, context=1024, vocab_size=GPT2_VOCABULARY),
    "gpt2-350M": GPT2Config(n_layer=24, n_head=16, n_embd=1024, context=1024, vocab_size=GPT2_VOCABULARY),
    "gpt2-774M": GPT2Config(n_layer=36, n_head=20, n_embd=1280, context=1024, vocab_size=GPT2_VOCABULARY),
    "gpt2-1558M": GPT2Config(n_layer=48, n_head=25, n_embd=1600, context=1024, vocab_size=GPT2_VOCABULARY),
}

OTHER_NAMES = {  # in Hugging Face and nanoGPT
    "gpt2": "gpt2-124M", "gpt2-medium": "gpt2-350M", "gpt2-large": "gpt2-774M", "gpt2-xl": "gpt2-1558M",
}  # fmt: skip


def preset_name(name: str) -> str:
    """Return our name of a preset that Hugging Face and nanoGPT name otherwise; return other names unchanged."""
    return OTHER_NAMES.get(name, name)


def flops_per_token(config: GPT2Config, sequence_length: int, parameters: int) -> int:
    """Return the floating-point operations per token, forward and backward, from which MFU is computed.

    Count as llm.c does (mfu.h): 6 N for the parameters, with the padded vocabulary, and 6 L C T for causal attention.
    """
    return 6 * parameters + 6 * config.n_layer * config.n_embd * sequence_length
