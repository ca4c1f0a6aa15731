"""One training step on one rank: how close to the hardware's limit, and how it compares with PyTorch.

    python scripts/bench_step.py --model gpt2-124M --batch-size 4 --seq-len 256
    python scripts/bench_step.py --model gpt2-124M --batch-size 4 --seq-len 256 --vs torch --json step.json
    python scripts/bench_step.py --backend cupy --batch-size 64 --seq-len 1024 --vs torch --vs llmc=PATH --json gpu.json

Every contender is a process of its own, so that peak memory is its own too. --vs torch adds PyTorch eager and compiled;
torch is not a dependency of the project. On CPUs contenders take turns, so that a drift of the machine meets all of
them.

On CPUs the floor is the time of all matrix products of the step: same shapes, dtype and threads, attention's included
and its masked half not skipped. A step in bfloat16 is compared with our own in float32. "peak / it" is the part of each
step that its products would take by our instruction at its measured peak: the rest is all there is to gain.
On a GPU (--backend cupy) each contender has the GPU to itself, and every kernel of ours stands beside the time that its
bytes or floating point operations take at the rates of this GPU, measured in the same run. --vs llmc=PATH runs llm.c's
train_gpt2cu, which the user has built. Our own figures come first, --json is written after every result, and the whole
run ends within eight minutes.
"""

import argparse
import os
import sys
from pathlib import Path

from dist.console import open_console
from gpt2.config import PRESETS, preset_name
from gpt2.errors import UserError
from gpt2.files import place_of_file
from scripts.settings.command_line import Parser
from scripts.step_bench.process import ContenderError, serve


def main():
    settings = parse()
    if settings.backend == "cupy":
        from scripts.step_bench import gpu as bench
        from scripts.step_bench import gpu_contenders as contenders
    else:
        from scripts.step_bench import cpu as bench
        from scripts.step_bench import cpu_contenders as contenders
    if settings.contender:  # this is a process that measures when it is asked (step_bench/process.py)
        return serve(contenders.MAKERS, *settings.contender)
    try:
        if settings.json:
            place_of_file(settings.json)  # before the minutes that this takes
        raise SystemExit(bench.bench(settings, PRESETS[settings.model]))
    except (ContenderError, UserError) as error:
        print(f"bench_step.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def rival(text: str) -> tuple[str, Path | None]:
    """A --vs: ("torch", None), or ("llmc", the program). Raises ArgumentTypeError."""
    name, _, path = text.partition("=")
    if text == "torch" or (name == "llmc" and path):
        return name, Path(path) if path else None
    raise argparse.ArgumentTypeError(f"{text}: expected torch or llmc=PATH")


def parse():
    parser = Parser(__doc__)
    parser.add_argument("--backend", choices=("numpy", "cupy"), default="numpy", help="CPUs or a GPU (numpy)")
    parser.add_argument(
        "--model", type=preset_name, choices=PRESETS, default="gpt2-124M", help="shape by name (gpt2-124M)"
    )
    parser.add_argument("--batch-size", type=int, default=4, help="B: sequences (4)")
    parser.add_argument("--seq-len", type=int, default=256, help="T: tokens of a sequence (256)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(bfloat16 on a GPU, float32 on CPUs)")
    parser.add_argument("--threads", type=int, help="of each contender on CPUs (all cores)")
    parser.add_argument(
        "--repeat", type=int, default=7, help="turns of each contender (7), of a step on CPUs and five on a GPU"
    )
    parser.add_argument(
        "--vs", type=rival, action="append", default=[], metavar="torch|llmc=PATH",
        help="also measure PyTorch, eager and compiled; cupy: llm.c, by its train_gpt2cu at PATH",
    )  # fmt: skip
    parser.add_argument(
        "--peak-tflops", type=float, help="cupy: what MFU is a fraction of (this GPU's datasheet, dense bfloat16)"
    )
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)  # what each one's process is given: NAME SHAPE
    settings = parser.parse_args()
    settings.vs = dict(settings.vs)
    if settings.backend == "cupy":
        if settings.threads:
            parser.error("--threads is for --backend numpy")
        settings.dtype = settings.dtype or "bfloat16"
        if "llmc" in settings.vs and settings.dtype != "bfloat16":
            parser.error("--vs llmc is for --dtype bfloat16")
        return settings
    if settings.peak_tflops:
        parser.error("--peak-tflops is for --backend cupy")
    if "llmc" in settings.vs:
        parser.error("--vs llmc is for --backend cupy")
    settings.dtype = settings.dtype or "float32"
    settings.threads = settings.threads or len(os.sched_getaffinity(0))
    return settings


if __name__ == "__main__":
    open_console()
    main()
