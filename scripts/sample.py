"""Generate text from a model, printed token by token.

    python scripts/sample.py runs/sliced --prompt "ROMEO:" --tokens 200             a run: its newest checkpoint
    python scripts/sample.py gpt2_124M.bin --prompt "The ocean" --temperature 0     an llm.c file; the likeliest tokens
    python scripts/sample.py my-gpt2/ --top-k 0 --top-p 0.9 --seed 7 > text.txt     a Hugging Face folder

A checkpoint such as RUN/checkpoints/step-00000100 also works. The text goes to standard output, everything else to
standard error. The model reads sequences of --seq-len tokens, by default the run's training length. If the text grows
longer, the model continues from the newest half of the sequence. The text ends early where the model ends its document.
The model runs on a GPU if there is one, else on CPU cores. Tokens are drawn on the host, so the same seed gives the
same text, but the different rounding of GPU and CPU cores can change a draw.
"""

import argparse
import os
import sys
import time
from itertools import chain
from pathlib import Path

from dist.console import BY_CTRL_C, open_console
from gpt2.data.documents import READ_AS_TEXT, SPLIT_HELP
from gpt2.data.tokenizers import END_OF_TEXT, TOKENIZERS
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.inference.cached_model import CachedGPT2
from gpt2.inference.generated_text import Sampling, printable, sample_text
from gpt2.kernels import load_kernels
from scripts.backends.gpus import gpu_kernels, on_own_gpu
from scripts.settings.command_line import Parser
from scripts.settings.memory import check_parameters
from scripts.settings.sequence_length import choose_sequence_length
from scripts.settings.tokenizer import choose_tokenizer
from scripts.settings.training import AUTO, DTYPES


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Return the exit status: 2 if the model cannot be used or a flag is wrong."""
    settings = parse(arguments)
    try:
        stream(*begin(settings))
    except UserError as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return BY_CTRL_C
    except BrokenPipeError:  # the reader, such as `head`, has ended; discard the remaining output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("model", metavar="RUN|PATH", type=Path, help="a run folder, a checkpoint, or weights: .bin, .safetensors")
    add("--prompt", default="", metavar="TEXT", help="beginning of the text (none: a new document)")
    add("--split-documents", action="store_true", help=SPLIT_HELP)
    add("--tokens", type=int, default=200, metavar="N", help="tokens to draw, at most (200)")
    add("--seq-len", type=int, metavar="T", help="tokens per sequence (as in the run's training; else the context)")
    drawn = Sampling()
    warmth = "randomness; 0: always the likeliest token (0.8)"
    add("--temperature", type=float, default=drawn.temperature, metavar="X", help=warmth)
    add("--top-k", type=int, default=drawn.top_k, metavar="K", help="draw from the K likeliest tokens; 0: all (200)")
    add("--top-p", type=float, default=drawn.top_p, metavar="P", help="the likeliest of total probability P (1: all)")
    add("--seed", type=int, default=1337, help="random seed; the same seed gives the same text (1337)")
    add(
        "--tokenizer",
        choices=TOKENIZERS,
        help="the model's tokenizer (that of its run or folder, else chosen by vocabulary size)",
    )
    add("--backend", choices=(AUTO, "numpy", "cupy"), default=AUTO, help="kernels; auto: cupy if there is a GPU")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help=f"number format; on CPUs only of products ({DTYPES[0]})")
    add("--threads", type=int, metavar="N", help="CPU cores to use (all)")
    return parser.parse_args(arguments)


def begin(settings) -> tuple:
    """Return (prompt, generated pieces of text, lines of facts). Raise UserError for a wrong flag or model."""
    for name, least in (("tokens", 1), ("seq_len", 1), ("seed", 0), ("threads", 1)):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}, expected at least {least}")
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    config = weights.read_config(settings.model)
    check_parameters(settings.model, config)
    length, about_length = choose_sequence_length(settings.seq_len, settings.model, config)
    encoding = choose_tokenizer(settings.tokenizer, settings.model, config.vocab_size)
    model, place = load_model(settings, length)
    drawn = settings.prompt, settings.tokens, sampling, settings.seed, settings.split_documents
    pieces = sample_text(model, encoding, *drawn)
    size = f"{model.parameters.layout.count / 1e6:.1f}M parameters"
    lines = [f"{size}, {encoding.name} tokens, computing on {place}", about_length]
    if END_OF_TEXT in settings.prompt and not settings.split_documents:
        lines.append(f"--prompt: {READ_AS_TEXT}")
    return settings.prompt, pieces, "\n".join(filter(None, lines))


def load_model(settings, length: int) -> tuple[CachedGPT2, str]:
    """Return the model on a GPU or CPU cores, and a line that says where. Raise UserError if it cannot run there."""
    parameters = weights.load(settings.model)
    why = ""
    if settings.backend != "numpy":
        try:
            kernels = gpu_kernels(parameters.layout, 0, 1)
            model = CachedGPT2(kernels, on_own_gpu(kernels, parameters, settings.dtype), length)
            return model, f"{kernels.device.maker['device']}, in {settings.dtype}"
        except UserError as error:
            if settings.backend == "cupy":
                raise
            why = f" ({error})" if "cupy" in sys.modules else ""  # without CuPy no GPU is expected
    kernels = load_kernels("numpy", settings.threads or len(os.sched_getaffinity(0)), dtype=settings.dtype)
    products = "" if settings.dtype == "float32" else f", products by {kernels.device.how}"
    return CachedGPT2(kernels, parameters, length), f"{kernels.device.threads} CPU cores{products}{why}"


def stream(prompt: str, pieces, facts: str) -> None:
    """Print the prompt and each piece as it arrives. On a terminal omit control characters."""
    shown = printable if sys.stdout.isatty() else str
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    print(facts, file=sys.stderr, flush=True)
    # Two of the pieces are not tokens: the prompt, and the last piece, the rest of an incomplete character.
    tokens = -2
    begun = time.perf_counter()
    try:
        for piece in chain([prompt], pieces):
            sys.stdout.write(shown(piece))
            sys.stdout.flush()
            tokens += 1
    finally:
        print(flush=True)
    print(f"{tokens / (time.perf_counter() - begun):.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    open_console()
    sys.exit(main())
