"""What was measured on a GPU, as the generated blocks of docs/gpu.md.

    python scripts/makers/docs_gpu.py --tests runs/test-gpu.json --step gpu.json

Takes the files of `make test-gpu` and of `bench_step.py --backend cupy --json`, either or both, from the machine with
the GPU; needs none itself. docs/gpu.md holds a block for each between its two marks.
"""

import argparse
import json
from pathlib import Path

from dist.console import open_console
from scripts.makers.pages.page import fenced, replace_block
from scripts.step_bench.gpu import CONTENDERS
from scripts.step_bench.gpu_table import whole_text

PAGE = "docs/gpu.md"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, help="what make test-gpu wrote")
    parser.add_argument("--step", type=Path, help="what bench_step.py --backend cupy --json wrote")
    arguments = parser.parse_args()
    if arguments.tests:
        replace_block(PAGE, "gpu_tests", tests_block(json.loads(arguments.tests.read_text())))
    if arguments.step:
        replace_block(PAGE, "gpu_step", step_block(json.loads(arguments.step.read_text())))


def tests_block(report: dict) -> str:
    """A line a test that did not pass, and how many did."""
    lines = [f"{', '.join(f'{count} {outcome}' for outcome, count in report['summary'].items())}."]
    for name, test in report["tests"].items():
        if test["outcome"] != "passed":
            reason = test.get("reason") or test.get("error", "").strip().splitlines()[-1]
            lines.append(f"- `{name.removeprefix('tests/gpu/on_device/')}` {test['outcome']}: {reason}")
    return "\n".join([*lines, "", measured_on(report["machine"])])


def step_block(report: dict) -> str:
    """The tables as the command printed them."""
    torch = report["contenders"].get("torch", {}).get("versions", {})
    return f"{fenced(whole_text(report, CONTENDERS))}\n\n{measured_on(report['machine'], torch)}"


def measured_on(machine: dict, more: dict | None = None) -> str:
    """The GPU and software that the numbers are of."""
    known = ("driver's CUDA", "CuPy's CUDA", "CuPy", "NVRTC", "numpy")
    versions = {name: machine[name] for name in known if name in machine} | (more or {})
    return f"Measured on {machine['GPU']}, with {', '.join(f'{name} {value}' for name, value in versions.items())}."


if __name__ == "__main__":
    open_console()
    main()
