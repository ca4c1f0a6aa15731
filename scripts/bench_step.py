"""Time one training step on one rank, against the hardware's limit and against PyTorch.

    python scripts/bench_step.py --model gpt2-124M --batch-size 4 --seq-len 256
    python scripts/bench_step.py --model gpt2-124M --batch-size 4 --seq-len 256 --vs torch --json step.json
    python scripts/bench_step.py --backend cupy --batch-size 64 --seq-len 1024 --vs torch --vs llmc=PATH --json gpu.json

Every contender is a separate process, so that its memory can be measured. --vs torch adds PyTorch, eager and compiled;
torch is not a dependency of the project. If a contender cannot be measured, a line says why, and the exit code is 1.

On CPUs contenders take turns, so that drifts of the machine affect all of them. "matrix products alone" is the time of
the step's matrix products, with the same shapes, dtype and threads; attention's products include the masked half. A
bfloat16 step is also compared with ours in float32. MFU's 100% is the measured peak of the CPU's multiply-add.

On a GPU (--backend cupy) each contender has the GPU to itself; MFU's 100% is the datasheet's dense bfloat16. --vs
llmc=PATH runs a train_gpt2cu of llm.c that you have built. Profilers (nsys, ncu) show the times of single kernels.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from dist.console import open_console
from gpt2.config import PRESETS, preset_name
from gpt2.errors import UserError
from gpt2.files import place_of_file
from scripts.settings.command_line import USER_MISTAKE, Parser
from scripts.step_bench.process import ContenderError, serve


def main():
    settings = parse()
    if settings.contender:  # this process measures on request (step_bench/process.py)
        from scripts.step_bench.contenders import MAKERS

        return serve(MAKERS, *settings.contender)
    from scripts.step_bench.bench import bench

    try:
        if settings.json:
            place_of_file(settings.json)  # fail before the minutes of measuring
        raise SystemExit(bench(settings, PRESETS[settings.model]))
    except (ContenderError, UserError) as error:
        print(f"bench_step.py: error: {error}", file=sys.stderr)
        raise SystemExit(USER_MISTAKE) from None


def rival(text: str) -> tuple[str, Path | None]:
    """Parse --vs into ("torch", None) or ("llmc", the program). Raise ArgumentTypeError."""
    name, _, path = text.partition("=")
    if text == "torch" or (name == "llmc" and path):
        return name, Path(path) if path else None
    raise argparse.ArgumentTypeError(f"{text}: expected torch or llmc=PATH")


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--backend", choices=("numpy", "cupy"), default="numpy", help="CPUs or a GPU (numpy)")
    add("--model", type=preset_name, choices=PRESETS, default="gpt2-124M", help="shape of the model (gpt2-124M)")
    add("--batch-size", type=int, default=4, metavar="B", help="sequences per step (4)")
    add("--seq-len", type=int, default=256, metavar="T", help="tokens per sequence (256)")
    add("--dtype", choices=("float32", "bfloat16"), help="number format (bfloat16 on a GPU, float32 on CPUs)")
    add("--threads", type=int, metavar="N", help="threads of each contender on CPUs (all cores)")
    add("--repeat", type=int, default=7, metavar="R", help="turns of each contender (7): a step on CPUs, five on a GPU")
    rivals = "also measure PyTorch, eager and compiled; with cupy also the train_gpt2cu of llm.c at PATH"
    add("--vs", type=rival, action="append", default=[], metavar="torch|llmc=PATH", help=rivals)
    add("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    add("--contender", nargs=2, help=argparse.SUPPRESS)  # starts a contender's process: NAME SHAPE
    settings = parser.parse_args()
    settings.vs = dict(settings.vs)
    if "torch" in settings.vs and find_spec("torch") is None:
        parser.end("--vs torch needs PyTorch: pip install torch (the project itself does not)")
    if settings.backend == "cupy":
        if settings.threads:
            parser.error("--threads is for --backend numpy")
        if "llmc" in settings.vs and settings.dtype == "float32":
            parser.error("--vs llmc is for --dtype bfloat16")
    elif "llmc" in settings.vs:
        parser.error("--vs llmc is for --backend cupy")
    settings.dtype = settings.dtype or ("bfloat16" if settings.backend == "cupy" else "float32")
    settings.threads = settings.threads or len(os.sched_getaffinity(0))
    return settings


if __name__ == "__main__":
    open_console()
    main()
