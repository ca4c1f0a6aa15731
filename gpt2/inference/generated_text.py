"""Text from a model: prompt to tokens, tokens to pieces of text as they come."""

import codecs
from collections.abc import Iterable, Iterator

import numpy as np
import tiktoken

from gpt2.data.texts import join_tokens, tokens_of
from gpt2.errors import UserError
from gpt2.inference.generate import CachedGPT2, check_prompt, generate
from gpt2.inference.sampling import Sampling
from gpt2.parameters import Parameters

# What moves a terminal's cursor or changes its state: all control characters but tab and newline.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


def sample_text(
    kernels,
    parameters: Parameters,
    encoding: tiktoken.Encoding,
    prompt: str,
    count: int,
    sampling: Sampling,
    seed: int | tuple[int, ...],
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, together at most `count` tokens; they end early at an end-of-text.

    kernels: NumPy's; parameters: whole, in host memory. The same arguments give the same text (where products round
    differently, on another machine or number of threads, up to the draws which that decides). Only tokens that the
    tokenizer has are drawn. UserError, before the first piece: the prompt is not UTF-8 or longer than the context.
    """
    config = parameters.layout.config
    tokens = prompt_tokens(prompt, encoding)
    check_prompt(tokens, config)
    random = np.random.default_rng(seed)

    def choose(logits):
        return sampling.choose(logits[: encoding.n_vocab], random)

    return text_pieces(generate(CachedGPT2(kernels, parameters), tokens, choose, count), encoding)


def prompt_tokens(prompt: str, encoding: tiktoken.Encoding) -> np.ndarray:
    """Its tokens (n,); of an empty one what stands before a document: end-of-text, or a newline in bytes."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the prompt is not UTF-8, expected UTF-8 text: check the terminal's encoding") from None
    return tokens_of(prompt, encoding) if prompt else document_start(encoding)


def document_start(encoding: tiktoken.Encoding) -> np.ndarray:
    """The tokens (1,) that separate documents in training data."""
    return join_tokens(["", ""], encoding)


def text_pieces(tokens: Iterable[int], encoding: tiktoken.Encoding) -> Iterator[str]:
    """The text of tokens, a piece each, up to an end-of-text token.

    A character whose bytes are spread over several tokens comes with the last of them; bytes that are no UTF-8, or
    stay incomplete, become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    end_of_text = encoding.eot_token if encoding.special_tokens_set else None
    for token in tokens:
        if token == end_of_text:
            break
        yield decoder.decode(encoding.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def printable(text: str) -> str:
    """The text with control characters replaced: a model of bytes may write what a terminal would obey."""
    return text.translate(CONTROLS)
