"""Text from a model, printed as it is drawn.

    python scripts/sample.py runs/sliced --prompt "def main(" --tokens 200          a run: its newest checkpoint
    python scripts/sample.py gpt2_124M.bin --prompt "The ocean" --temperature 0     llm.c's file; 0: the likeliest token
    python scripts/sample.py my-gpt2/ --top-k 0 --top-p 0.9 --seed 7 > text.txt     a folder of Hugging Face's

Also a checkpoint, RUN/checkpoints/step-00000100. The text goes to standard output, all else to standard error. Text may
become longer than the model's context: when that is full, its newest half is read anew. It ends early where the model
ends its document. It computes on CPU cores, in float32, also where a GPU has trained.
"""

import argparse
import os
import sys
import time
from itertools import chain
from pathlib import Path

from gpt2.data.tokenizers import TOKENIZERS
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.inference.generated_text import Sampling, printable, sample_text
from gpt2.kernels import load_kernels
from scripts.settings.tokenizer import choose_tokenizer

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C ended


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 where the model cannot be used or the flags not be meant."""
    settings = parse(arguments)
    try:
        stream(*begin(settings))
    except UserError as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has had enough, like `head`; nothing is left to be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="RUN|PATH", type=Path, help="a run folder, a checkpoint, or weights: .bin, .safetensors")
    add("--prompt", default="", metavar="TEXT", help="the text to go on with (none: as a document begins)")
    add("--tokens", type=int, default=200, metavar="N", help="how many, at most (200)")
    add("--temperature", type=float, default=Sampling.temperature, help="0: always the likeliest token (0.8)")
    add("--top-k", type=int, default=Sampling.top_k, help="draw from so many of the likeliest, 0 for all (200)")
    add("--top-p", type=float, default=Sampling.top_p, help="from the likeliest that have this probability (1: all)")
    add("--seed", type=int, default=1337, help="the same seed gives the same text (1337)")
    add("--tokenizer", choices=TOKENIZERS, help="the run's; else gpt2 for a vocabulary of 50257, bytes for 256")
    add("--threads", type=int, help="CPU cores to use (all)")
    return parser.parse_args(arguments)


def begin(settings):
    """The prompt, and the pieces of text that follow it; all that may be wrong with the flags is said here."""
    for name, least in (("tokens", 1), ("seed", 0), ("threads", 1)):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}, expected at least {least}")
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    config = weights.read_config(settings.model)
    encoding = choose_tokenizer(settings.tokenizer, settings.model, config.vocab_size)
    parameters = weights.load(settings.model)
    kernels = load_kernels("numpy", settings.threads or len(os.sched_getaffinity(0)))
    pieces = sample_text(kernels, parameters, encoding, settings.prompt, settings.tokens, sampling, settings.seed)
    size, cores = f"{parameters.layout.count / 1e6:.1f}M parameters", kernels.device.threads
    return settings.prompt, pieces, f"{size}, {encoding.name} tokens, computing on {cores} CPU cores"


def stream(prompt: str, pieces, facts: str) -> None:
    """Write the prompt and then each piece as it comes; to a terminal nothing that it would obey."""
    shown = printable if sys.stdout.isatty() else str
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    print(facts, file=sys.stderr, flush=True)
    tokens, begun = -2, time.perf_counter()  # the prompt is none, nor the last piece: what stayed incomplete
    try:
        for piece in chain([prompt], pieces):
            sys.stdout.write(shown(piece))
            sys.stdout.flush()
            tokens += 1
    finally:
        print(flush=True)
    print(f"{tokens / (time.perf_counter() - begun):.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
