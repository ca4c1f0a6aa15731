"""Evaluate a model on any number of ranks: validation loss, perplexity of a text, HellaSwag.

    mpirun -n 4 python scripts/evaluate.py runs/sliced --val-data 'tokens/*_val_*.bin'
    mpirun -n 4 python scripts/evaluate.py gpt2_124M.bin --hellaswag hellaswag_val.bin --json hellaswag.json
    python scripts/evaluate.py my-gpt2/ --text wikitext.txt --stride 256

The model is a run (its newest checkpoint), a checkpoint, an llm.c file or a Hugging Face folder. Every rank holds the
whole model, and the sequences are divided among the ranks; a different number of ranks changes the result only by
rounding. A run is evaluated on sequences of its training length unless --seq-len is given.

--val-data   mean loss over all whole windows of --seq-len tokens, as with train.py --eval-steps 0.
--text       loss of every token of a file or folder, read as by prepare.py, and of the end-of-text tokens between
             documents. The first token is predicted from an end-of-text token (bytes: from a newline). Windows of
             --seq-len tokens advance by --stride, and each window scores its new tokens.
--hellaswag  llm.c's evaluation file. acc: how often the right ending has the highest probability; acc_norm: how often
             it has the highest probability per token (EleutherAI's harness divides by characters instead).
"""

import argparse
from pathlib import Path

from dist.console import open_console
from dist.world import start_world
from gpt2.data.documents import SPLIT_HELP
from gpt2.data.tokenizers import TOKENIZERS
from gpt2.errors import UserError
from gpt2.files import place_of_file, write_json
from scripts.settings.training import AUTO, DTYPES, OneLineParser
from scripts.training.evaluation import load_model, prepare_choices, prepare_text, prepare_validation


def evaluate(settings, world) -> None:
    """Run the evaluations on all ranks. Rank 0 prints a line for each and writes --json. A mistake ends the job."""
    s = settings
    with world.together(UserError):
        if world.rank == 0 and s.json:
            place_of_file(s.json)  # fail now, not after an evaluation of hours
    model = load_model(Path(s.model), s.seq_len, s.stride, s.batch_size, s.backend, s.dtype, s.threads, world)
    evaluations = {}
    if s.val_data:
        evaluations["val_data"] = prepare_validation(model, s.val_data, s.tokenizer, world)
    if s.text:
        evaluations["text"] = prepare_text(model, s.text, s.tokenizer, s.split_documents, world)
    if s.hellaswag:
        evaluations["hellaswag"] = prepare_choices(model, s.hellaswag, s.tokenizer, world)
    results = {}
    for name, measure in evaluations.items():
        results[name] = measure()
        world.print(f"{name.replace('_', '-'):<10} {as_line(results[name])}")
    with world.together(UserError):
        if world.rank == 0 and s.json:
            write_json(s.json, {"model": s.model, "seq_len": model.sequence_length} | results)


def parse(arguments=None) -> argparse.Namespace:
    """Parse the flags. A mistake in them ends the program with one line."""
    parser = OneLineParser(__doc__)
    add = parser.add_argument
    add("model", metavar="RUN|PATH", help="a run folder, a checkpoint, or weights: .bin, .safetensors")
    add("--val-data", metavar="GLOB", help="llm.c token shards, a glob in quotes")
    add("--text", type=Path, metavar="PATH", help="a file or folder of text, read as by prepare.py")
    add("--split-documents", action="store_true", help=f"with --text: {SPLIT_HELP}")
    add("--hellaswag", type=Path, metavar="FILE", help="llm.c's hellaswag_val.bin, or another of its evaluations")
    add(
        "--tokenizer",
        choices=TOKENIZERS,
        help="the model's tokenizer (that of its run or folder, else chosen by vocabulary size)",
    )
    add("--batch-size", type=int, default=4, metavar="B", help="sequences per rank and forward pass (4)")
    add("--seq-len", type=int, metavar="T", help="tokens per window (as in the run's training; else the context)")
    add("--stride", type=int, metavar="S", help="with --text: new tokens per window (half of --seq-len)")
    add("--backend", choices=(AUTO, "numpy", "cupy"), default=AUTO, help="kernels; auto: cupy if there is a GPU")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help=f"number format of matrix operands on CPUs ({DTYPES[0]})")
    add("--threads", type=int, default=0, metavar="N", help="threads per rank; 0: its share of the node's cores")
    add("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    settings = parser.parse_args(arguments)
    if not (settings.val_data or settings.text or settings.hellaswag):
        parser.error("nothing to evaluate on: give --val-data, --text or --hellaswag")
    for name, least in (("batch_size", 1), ("seq_len", 1), ("stride", 1), ("threads", 0)):
        value = getattr(settings, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}, expected at least {least}")
    return settings


def as_line(numbers: dict) -> str:
    """Return a line such as "loss 3.2918  perplexity 26.8901  tokens 1,048,576"."""
    words = (f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in numbers.values())
    return "  ".join(f"{name} {word}" for name, word in zip(numbers, words, strict=True))


if __name__ == "__main__":
    open_console()
    evaluate(parse(), start_world(mistakes=(UserError,)))
