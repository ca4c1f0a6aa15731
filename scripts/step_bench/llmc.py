"""llm.c with the same shape on the same GPU: run the user's train_gpt2cu in bfloat16 and parse the printed times.

It starts with random parameters and repeats one batch of random tokens, like the other contenders. Its backward
recomputes nothing, and products apply GELU in their epilogues: this is llm.c's fastest configuration on Hopper.
"""

import re
import subprocess
import tempfile
from itertools import islice
from pathlib import Path
from statistics import fmean

import numpy as np

from gpt2.data.shards import write_shard
from scripts.step_bench.process import ContenderError

STEP = re.compile(r"^step +\d+/\d+ \| loss +(\S+) .*\| +([\d.]+) ms \|", re.MULTILINE)
MEMORY = re.compile(r"^device memory usage: (\d+) MiB", re.MULTILINE)


class LlmcRun:
    """A complete run of llm.c, which answers requests for its steps like a ContenderProcess."""

    def __init__(self, program: Path, shape: dict, steps: int):
        self._steps = iter(run_llmc(program, shape, steps))

    def ask(self, count: int) -> dict:
        """Return the mean time of the next `count` steps, and the loss of the last of them."""
        taken = [*islice(self._steps, count)]
        step_s = fmean(step["step_s"] for step in taken)
        return taken[-1] | {"step_s": step_s, "parts": {}, "versions": {}}

    def close(self) -> None:
        """Do nothing: the program has ended."""


def run_llmc(program: Path, shape: dict, steps: int) -> list[dict]:
    """Return {"step_s", "loss", "memory_bytes"} of each step; the memory is all that is allocated on the GPU.

    shape: as for contenders. Raise ContenderError if the program fails, or trains in another precision or shape.
    """
    config = shape["config"]
    B = shape["batch_size"]
    T = shape["seq_len"]
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens.bin")
        write_shard(tokens, np.random.default_rng(1).integers(config["vocab_size"], size=B * T + 1))
        flags = {
            "-i": tokens, "-j": tokens, "-e": f"d{config['n_layer']}", "-b": B, "-t": T, "-x": steps, "-a": 1, "-r": 0,
            "-ge": 2, "-c": 0.1, "-v": steps, "-m": 1, "-s": 0,
        }  # fmt: skip
        printed = _output([program.resolve(), *(word for flag in flags.items() for word in flag)], folder)
    _check(printed, shape)
    memory = MEMORY.search(printed)
    found = STEP.findall(printed)
    if memory is None or len(found) != steps:
        raise ContenderError(f"llm.c printed {len(found)} steps, expected {steps} and its memory: is it train_gpt2cu?")
    memory_bytes = int(memory[1]) << 20
    return [{"step_s": float(ms) / 1e3, "loss": float(loss), "memory_bytes": memory_bytes} for loss, ms in found]


def _output(command: list, folder: str) -> str:
    try:
        process = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ContenderError(f"llm.c does not start: {error}") from None
    if process.returncode:
        last = (process.stderr.strip() or process.stdout.strip() or "no output").splitlines()[-1]
        raise ContenderError(f"llm.c ended with code {process.returncode}: {last}")
    return process.stdout


def _check(printed: str, shape: dict) -> None:
    """Raise ContenderError unless the printed table of settings agrees with the other contenders' settings."""
    config = shape["config"]
    expected = {
        "precision": "BF16", "micro batch size B": shape["batch_size"], "sequence length T": shape["seq_len"],
        "num_layers L": config["n_layer"], "num_heads NH": config["n_head"], "channels C": config["n_embd"],
        "vocab_size V": config["vocab_size"],
    }  # fmt: skip
    for name, value in expected.items():
        row = re.search(rf"^\| {re.escape(name)} +\| (\S+) ", printed, re.MULTILINE)
        if row is None or row[1] != str(value):
            raise ContenderError(f"llm.c has {name} {row and row[1]}, expected {value}: give a shape that it knows")
