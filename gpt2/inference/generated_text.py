"""Generate text: tokenize the prompt, sample one token after another, and decode the tokens to text."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import tiktoken

from gpt2.data.texts import document_start, join_tokens
from gpt2.data.tokenizers import END_OF_TEXT
from gpt2.errors import UserError
from gpt2.inference.cached_model import CachedGPT2

# All control characters but tab and newline: a terminal would move its cursor or change its state.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


@dataclass(frozen=True)
class Sampling:
    """How to draw the next token: temperature, top-k (Fan et al. 2018) and nucleus sampling (Holtzman et al. 2020).

    temperature: divides the logits; 0 always takes the likeliest token. top_k: only the k likeliest tokens may be
    drawn; 0 allows all. top_p: of these, only the likeliest, as few as together have probability top_p; 1 allows
    all. Ties go to the lowest ids.
    """

    temperature: float = 0.8
    top_k: int = 200
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature is {self.temperature}, expected a number of at least 0 (0: the likeliest)")
        if self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k}, expected at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}, expected above 0 and at most 1 (1: all tokens)")

    def choose(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """Draw a token with one number of `random`; temperature 0 needs none. UserError: a logit is not finite."""
        if not np.isfinite(logits).all():
            raise UserError("the model's logits are not finite: the weights are damaged, or their training diverged")
        if self.temperature == 0:
            return int(np.argmax(logits))
        probabilities = self.probabilities(logits)
        drawable = np.flatnonzero(probabilities)
        reached = np.cumsum(probabilities[drawable])
        place = np.searchsorted(reached, random.random() * reached[-1], side="right")
        return int(drawable[min(place, len(drawable) - 1)])  # random * sum may round up to the sum

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities (V,) float64 of all tokens from logits (V,); temperature above 0."""
        with np.errstate(over="ignore"):  # small temperatures overflow to -inf, and exp(-inf) is correct
            weights = np.exp((logits.astype(np.float64) - float(logits.max())) / self.temperature)
        if not (0 < self.top_k < len(weights) or self.top_p < 1):
            return weights / weights.sum()
        likeliest = np.argsort(-logits, kind="stable")[: self.top_k or None]
        kept = weights[likeliest] / weights[likeliest].sum()
        before = np.cumsum(kept) - kept
        count = max(1, int(np.sum(before < self.top_p)))
        probabilities = np.zeros_like(weights)
        probabilities[likeliest[:count]] = kept[:count] / kept[:count].sum()
        return probabilities


def sample_text(
    model: CachedGPT2,
    encoding: tiktoken.Encoding,
    prompt: str,
    count: int,
    sampling: Sampling,
    seed: int | tuple[int, ...],
    splits: bool = False,
) -> Iterator[str]:
    """Yield pieces of text after `prompt`: at most `count` tokens, or up to an end-of-text token.

    splits: as in prompt_tokens. Only tokens of the tokenizer's vocabulary are drawn. The same arguments give the same
    text on one machine with one number of threads; elsewhere products round differently, which can change a draw.
    UserError, before the first piece: the prompt is not UTF-8, or too long for the model.
    """
    tokens = prompt_tokens(prompt, encoding, splits)
    check_prompt(tokens, model.config, model.sequence_length)
    random = np.random.default_rng(seed)

    def choose(logits):
        return sampling.choose(logits[: encoding.n_vocab], random)

    return text_pieces(generate(model, tokens, choose, count), encoding)


def prompt_tokens(prompt: str, encoding: tiktoken.Encoding, splits: bool = False) -> np.ndarray:
    """Return the prompt's tokens (n,); of an empty prompt the separator of documents: end-of-text, or a newline.

    splits: each <|endoftext|> in the prompt is such a separator; otherwise it is ordinary text.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the prompt is not UTF-8, expected UTF-8 text: check the terminal's encoding") from None
    if not prompt:
        return document_start(encoding)
    return join_tokens(prompt.split(END_OF_TEXT) if splits else [prompt], encoding)


def check_prompt(prompt, config, most: int) -> None:
    """Raise a UserError unless the model can read these tokens (n,), at most `most` at once."""
    if not 0 < len(prompt) <= most:
        of_model = "the model's context"
        advice = "shorten it"
        if most < config.context:
            of_model = "the length of its sequences"
            advice += f", or raise --seq-len up to the model's context, {config.context}"
        raise UserError(
            f"the prompt has {len(prompt)} tokens, expected 1 to {most}, {of_model}: "
            f"{advice if len(prompt) else 'give some text'}"
        )
    if max(prompt) >= config.vocab_size:
        raise UserError(
            f"the prompt has token {max(prompt)}, expected 0 to {config.vocab_size - 1}, the model's vocabulary: "
            "use its tokenizer, see --tokenizer"
        )


def generate(model, prompt, choose: Callable[[np.ndarray], int], count: int) -> Iterator[int]:
    """Yield `count` tokens after `prompt` (n,), 1 <= n <= T; choose(logits (V,)) draws each.

    model: a CachedGPT2 for T tokens. When its cache is full, it is emptied, and the newest T/2 tokens are read again as
    if the text began there: keys and values depend on learned positions and cannot move. So each token is drawn from at
    least T/2 tokens before it, and costs two rows on average.
    """
    most = model.sequence_length
    newest = unread = [int(token) for token in prompt][-most:]
    model.forget()
    for _ in range(count):
        token = choose(model.forward(unread))
        yield token
        newest = [*newest, token]
        unread = [token]
        if len(newest) > most:
            newest = unread = newest[-max(1, most // 2) :]
            model.forget()


def text_pieces(tokens: Iterable[int], encoding: tiktoken.Encoding) -> Iterator[str]:
    """Yield the text of each token, up to an end-of-text token, and then the rest, which is usually empty.

    A character that several tokens encode comes with the last of them. Invalid and incomplete bytes become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    end_of_text = encoding.eot_token if encoding.special_tokens_set else None
    for token in tokens:
        if token == end_of_text:
            break
        yield decoder.decode(encoding.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def printable(text: str) -> str:
    """Return the text with control characters replaced: a byte model may generate them, and a terminal obeys them."""
    return text.translate(CONTROLS)
