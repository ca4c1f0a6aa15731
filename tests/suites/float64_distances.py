"""The largest distance of each printed number from float64, at GPT-2's vocabulary, over numbers of ranks and threads.

    python tests/suites/float64_distances.py                           # ten minutes on two cores
    python tests/suites/float64_distances.py --layers 12 --ranks 1,4 --threads 2

train.py makes one step of a window a rank, evaluate.py does all that it can. The model has gpt2-124M's shapes, with
fewer layers, and predicts that each token comes again: one of 50257 terms outweighs the others, as in trained models.
The reference is the same model on the kernels in float64, one window at a time. Distances of norms and perplexities are
relative. Needs GPT-2's vocabulary for tiktoken. The exit code is 1 if a distance is above --limit.
"""

import argparse
import itertools
import json
import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from dist.probe.programs import mpirun_command, mpirun_environment
from gpt2.config import PRESETS
from gpt2.data.shards import write_shard
from gpt2.data.texts import join_tokens
from gpt2.data.tokenizers import load_tokenizer
from gpt2.formats import llmc
from gpt2.inference.evaluation import Scorer, strided_windows, text_losses
from gpt2.inference.evaluation_choices import count_correct, read_examples
from gpt2.kernels import load_kernels
from gpt2.model import new_model
from gpt2.parameters import Layout, Parameters, initialize
from tests.ranks.test_evaluate import write_evaluation
from tests.support.in_process import ROOT, log

RELATIVE = ("norm", "perplexity")
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "with", "as", "be", "by", "at", "from")


def main():
    settings, found = parse(), []
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder), settings)
        expected = reference(files, settings)
        for ranks, threads in itertools.product(settings.ranks, settings.threads):
            numbers = printed(files, settings, ranks, threads)
            wanted = expected["evaluate.py"] | expected[ranks]
            found += [(distance(name, numbers[name], wanted[name]), name, ranks, threads) for name in wanted]
            print(f"{ranks} ranks, {threads} threads: {max(found)[0]:.1e} at most so far", flush=True)
    print(f"\n{'number':32} {'largest distance':>16}  at")
    for name in dict.fromkeys(name for _, name, _, _ in found):
        largest, _, ranks, threads = max(each for each in found if each[1] == name)
        print(f"{name:32} {largest:16.1e}  {ranks} ranks, {threads} threads")
    raise SystemExit(max(found)[0] > settings.limit)


def parse():
    def numbers(text):
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a window (1024)")
    parser.add_argument("--ranks", type=numbers, default="1,2,3,4", help="a list (%(default)s)")
    parser.add_argument("--threads", type=numbers, default="1,2,3", help="of a rank, a list (%(default)s)")
    parser.add_argument("--limit", type=float, default=1e-5, help="the largest distance allowed (%(default)s)")
    return parser.parse_args()


def write_files(folder: Path, settings) -> Path:
    """A model, and what it is trained and evaluated on: frequent tokens, each some times in a row."""
    random, T = np.random.default_rng(5), settings.seq_len
    parameters = Parameters.zeros(Layout(replace(PRESETS["gpt2-124M"], n_layer=settings.layers)))
    initialize(parameters, 1)
    parameters.wte[:] *= 4
    parameters.wpe[:] *= 0.2
    llmc.write_parameters(folder / "model.bin", parameters)
    tokens = np.repeat(random.integers(1000, size=T), 8)
    write_shard(folder / "tokens.bin", tokens[: max(settings.ranks) * T + 1].astype(np.uint16))
    words = np.repeat(random.choice(WORDS, size=T // 8), 8)
    (folder / "text.txt").write_text(" ".join(words))
    examples = [
        (
            int(random.integers(4)),
            [first] * 20,
            [[int(token)] * 6 for token in random.permutation([first, 300, 400, 500])],
        )
        for first in range(600, 612)
    ]
    write_evaluation(folder / "choices.bin", examples)
    return folder


def reference(folder: Path, settings) -> dict[str | int, dict[str, float]]:
    """In float64: train.py's numbers, by number of ranks, and evaluate.py's."""
    kernels = load_kernels("numpy", 2)
    stored = Parameters.zeros(Layout(llmc.read_config(folder / "model.bin")))
    llmc.read_parameters(folder / "model.bin", stored)
    model = new_model(stored.layout.config, kernels, 1, settings.seq_len, np.float64)
    model.parameters.flat[:] = stored.flat
    expected = of_training(model, np.fromfile(folder / "tokens.bin", "<u2", offset=1024).astype(np.int32))
    val_loss = expected[max(settings.ranks)]["train.py loss"]
    of_text = of_evaluation(folder, Scorer(kernels, model.parameters, 1), settings.seq_len)
    expected["evaluate.py"] = {
        "train.py validation loss": val_loss, "--val-data loss": val_loss, "--val-data perplexity": math.exp(val_loss),
    } | of_text  # fmt: skip
    print({name: round(value, 6) for name, value in expected["evaluate.py"].items()}, flush=True)
    return expected


def of_training(model, tokens) -> dict[int, dict[str, float]]:
    """Loss and norm of the first windows, by their number."""
    T, losses, expected = model.sequence_length, [], {}
    for start in range(0, len(tokens) - 1, T):
        row = tokens[None, start : start + T + 1]
        losses.append(model.forward(row[:, :-1], row[:, 1:], 1.0) / T)
        model.backward(accumulate=start > 0)
        norm = math.sqrt(float(np.sum(np.square(model.gradients.flat)))) / len(losses) / T
        expected[len(losses)] = {"train.py loss": float(np.mean(losses)), "train.py gradients' norm": norm}
    return expected


def of_evaluation(folder: Path, scorer: Scorer, T: int) -> dict[str, float]:
    text, examples = (folder / "text.txt").read_text(), read_examples(folder / "choices.bin")
    tokens = join_tokens(["", text], load_tokenizer("gpt2"))
    total = text_losses(scorer, tokens, strided_windows(len(tokens), T, T // 2))
    loss = total / (len(tokens) - 1)
    acc, acc_norm = (count / len(examples) for count in count_correct(scorer, examples))
    return {
        "--text loss": loss, "--text perplexity": math.exp(loss),
        "--text bits_per_byte": total / math.log(2) / len(text),
        "--hellaswag acc": acc, "--hellaswag acc_norm": acc_norm,
    }  # fmt: skip


def printed(folder: Path, settings, ranks: int, threads: int) -> dict[str, float]:
    """What train.py logs and evaluate.py writes."""
    data = ["--val-data", folder / "tokens.bin", "--seq-len", settings.seq_len, "--batch-size", 1, "--threads", threads]
    start, run = ["--backend", "numpy"], folder / f"run-{ranks}-{threads}"
    training = ["--init", folder / "model.bin", "--train-data", folder / "tokens.bin", "--no-shuffle", "--steps", 1]
    training += ["--lr", 0, "--eval-every", 1, "--eval-steps", 0, "--peak-tflops", 0.1, "--out", run]
    training += ["--strategy", "allreduce", "--checkpoint-every", 0]
    launch(ranks, "train.py", *training, *data, *start)
    more = ["--text", folder / "text.txt", "--hellaswag", folder / "choices.bin", "--json", folder / "found.json"]
    launch(ranks, "evaluate.py", folder / "model.bin", *more, *data, *start)
    (step,), numbers = log(run), json.loads((folder / "found.json").read_text())
    found = {"loss": step["loss"], "gradients' norm": step["grad_norm"], "validation loss": step["val_loss"]}
    shutil.rmtree(run)
    found = {f"train.py {name}": value for name, value in found.items()}
    for name in ("val_data", "text", "hellaswag"):
        found |= {f"--{name.replace('_', '-')} {key}": value for key, value in numbers[name].items()}
    return found


def launch(ranks: int, script: str, *words) -> None:
    command = [*mpirun_command(ranks), sys.executable, ROOT / "scripts" / script, *words]
    subprocess.run(list(map(str, command)), env=mpirun_environment(ranks), check=True, stdout=subprocess.DEVNULL)


def distance(name: str, found: float, expected: float) -> float:
    return abs(found - expected) / (expected if name.endswith(RELATIVE) else 1.0)


if __name__ == "__main__":
    main()
